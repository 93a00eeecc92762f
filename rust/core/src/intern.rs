//! Numbers equal-length keys of `u16` in the order in which they first come: one array of keys and one of
//! hash slots, no allocation per key.

/// The keys seen so far.
#[derive(Debug, Default)]
pub struct Interner {
    width: usize,
    keys: Vec<u16>,
    count: usize,
    /// Number of the key + 1, 0 for empty; a power of two.
    slots: Vec<u32>,
}

impl Interner {
    /// For keys of `width` values.
    pub fn new(width: usize) -> Self {
        Self { width, slots: vec![0; 16], ..Self::default() }
    }

    /// Forgets all keys, of which the next ones have `width` values; the memory is kept.
    pub fn reset(&mut self, width: usize) {
        self.width = width;
        self.keys.clear();
        self.count = 0;
        self.slots.fill(0);
    }

    /// Number of distinct keys.
    pub fn len(&self) -> usize {
        self.count
    }

    /// No key was seen.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Bytes held.
    pub fn bytes(&self) -> u64 {
        (2 * self.keys.capacity() + 4 * self.slots.capacity()) as u64
    }

    /// The key with this number.
    #[inline]
    pub fn key(&self, number: usize) -> &[u16] {
        &self.keys[number * self.width..(number + 1) * self.width]
    }

    /// The number of `key`; it is new if that was [`Self::len`] before.
    #[inline]
    pub fn intern(&mut self, key: &[u16]) -> usize {
        debug_assert_eq!(key.len(), self.width);
        if self.count * 2 >= self.slots.len() {
            self.grow();
        }
        let mask = self.slots.len() - 1;
        let mut slot = hash(key) as usize & mask;
        loop {
            match self.slots[slot] {
                0 => break,
                found if self.key(found as usize - 1) == key => return found as usize - 1,
                _ => slot = (slot + 1) & mask,
            }
        }
        self.keys.extend_from_slice(key);
        self.count += 1;
        self.slots[slot] = self.count as u32;
        self.count - 1
    }

    fn grow(&mut self) {
        let size = self.slots.len() * 2;
        self.slots.clear();
        self.slots.resize(size, 0);
        for number in 0..self.count {
            let mut slot = hash(self.key(number)) as usize & (size - 1);
            while self.slots[slot] != 0 {
                slot = (slot + 1) & (size - 1);
            }
            self.slots[slot] = number as u32 + 1;
        }
    }
}

/// Multiply and fold; the high bits come down because slots use the low ones.
#[inline]
fn hash(key: &[u16]) -> u64 {
    let step = |state: u64, &part: &u16| {
        let product = (state ^ u64::from(part)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        product ^ product >> 29
    };
    key.iter().fold(0x51_7c_c1_b7, step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_keep_their_numbers_while_the_table_grows() {
        let mut interner = Interner::new(2);
        let key = |i: u16| [i % 50, i / 50];
        for round in 0..2 {
            for i in 0..1000 {
                assert_eq!(interner.intern(&key(i)), i as usize, "round {round}");
            }
        }
        assert_eq!(interner.len(), 1000);
        assert_eq!(interner.key(999), key(999));
    }

    #[test]
    fn the_empty_key_is_one_key() {
        let mut interner = Interner::new(0);
        assert!(interner.is_empty());
        assert_eq!([interner.intern(&[]), interner.intern(&[]), interner.len()], [0, 0, 1]);
    }
}
