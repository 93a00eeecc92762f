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
        self.intern_after(start(key), key)
    }

    /// [`Self::intern`] of a key whose [`start`] is known, as that of keys which differ in the last value only.
    #[inline]
    pub fn intern_after(&mut self, start: u64, key: &[u16]) -> usize {
        debug_assert_eq!(key.len(), self.width);
        if self.count * 2 >= self.slots.len() {
            self.grow();
        }
        let mask = self.slots.len() - 1;
        let mut slot = finish(start, key) as usize & mask;
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
            let key = self.key(number);
            let mut slot = finish(start(key), key) as usize & (size - 1);
            while self.slots[slot] != 0 {
                slot = (slot + 1) & (size - 1);
            }
            self.slots[slot] = number as u32 + 1;
        }
    }
}

/// What the hash of a key is made of before its last value: four values at a time are multiplied and folded.
#[inline]
pub fn start(key: &[u16]) -> u64 {
    let key = &key[..key.len().saturating_sub(1)];
    let (fours, rest) = key.as_chunks::<4>();
    let word = |four: &[u16; 4]| four.iter().rev().fold(0, |word, &part| word << 16 | u64::from(part));
    let state = fours.iter().fold(0x51_7c_c1_b7, |state, four| step(state, word(four)));
    rest.iter().fold(state, |state, &part| step(state, u64::from(part)))
}

/// The hash of a key from its [`start`] and its last value.
#[inline]
fn finish(start: u64, key: &[u16]) -> u64 {
    step(start, key.last().map_or(0, |&last| u64::from(last)))
}

/// Multiply and fold; the high bits come down because slots use the low ones.
#[inline]
fn step(state: u64, part: u64) -> u64 {
    let product = (state ^ part).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    product ^ product >> 32
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
    fn keys_of_every_width_are_told_apart() {
        for width in 1..11 {
            let mut interner = Interner::new(width);
            let key = |i: usize| (0..width).map(|part| u16::from(part == i)).collect::<Vec<_>>();
            for i in 0..width {
                assert_eq!(interner.intern(&key(i)), i);
            }
            let start = start(&key(width));
            assert_eq!(interner.intern_after(start, &key(width)), width);
            assert_eq!(interner.intern_after(start, &key(width - 1)), width - 1);
        }
    }

    #[test]
    fn the_empty_key_is_one_key() {
        let mut interner = Interner::new(0);
        assert!(interner.is_empty());
        assert_eq!([interner.intern(&[]), interner.intern(&[]), interner.len()], [0, 0, 1]);
    }
}
