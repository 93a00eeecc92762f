//! The search problem as it arrives from Python (JSON), and nothing derived from it.
//!
//! Forms are small integers: 0 is replicated, 1 is partial, `2 + d` is shard(d).
//! Costs are integers (picoseconds), so that bounds and optima are compared exactly.

use serde::{Deserialize, Serialize};

/// A form of a tensor: 0 replicated, 1 partial, `2 + d` shard(d).
pub type Form = u8;
/// Every device holds the tensor.
pub const IDENTITY: Form = 0;
/// Forms are bits of a `u32`, so dimensions run to 27 (28 dimensions).
pub const FORM_COUNT: Form = 30;
/// The sum of the dearest row of every instruction and the dearest move of every tensor stays below
/// this (2^59 ps is 6.6 days per step); it leaves headroom for exact 64-bit arithmetic.
pub const MAX_TOTAL_COST: i64 = 1 << 59;

/// A synthesis problem; see the crate documentation for its meaning.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Problem {
    /// Format version, 1.
    pub version: u32,
    /// Reference tensors.
    pub tensors: Vec<Tensor>,
    /// Instructions; each tensor is the output of exactly one.
    pub instructions: Vec<Instruction>,
    /// Forms that must be available at the end.
    #[serde(default)]
    pub requirements: Vec<Requirement>,
    /// Gradients that must be available in the stored form of their parameter.
    #[serde(default)]
    pub ties: Vec<Tie>,
}

/// A reference tensor and the communications allowed on it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tensor {
    /// Name used in messages.
    pub name: String,
    /// Allowed communications.
    pub moves: Vec<Move>,
    /// Prices of holding the tensor in a form (of memory, say); a form that is not listed costs nothing.
    /// Of the produced and the communicated form the cheaper is charged.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub keep: Vec<Keep>,
}

/// The price of holding a tensor `(form, cost)`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Keep(pub Form, pub i64);

/// A communication `(from, to, kind, cost in picoseconds)`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Move(pub Form, pub Form, pub String, pub i64);

/// An instruction of the reference graph with its Hoare triples.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Instruction {
    /// Name used in messages.
    pub name: String,
    /// Tensors read; may repeat.
    pub inputs: Vec<usize>,
    /// Tensors produced.
    pub outputs: Vec<usize>,
    /// Hoare triples.
    pub rows: Vec<Row>,
}

/// A Hoare triple with its compute cost.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    /// Form needed of each input.
    pub pre: Vec<Form>,
    /// Form given to each output.
    pub post: Vec<Form>,
    /// Picoseconds.
    pub cost: i64,
    /// The inputs must be available in the forms `pre` without a communication of them.
    #[serde(default, skip_serializing_if = "is_false")]
    pub direct: bool,
}

#[allow(clippy::trivially_copy_pass_by_ref)] // serde's signature.
fn is_false(value: &bool) -> bool {
    !value
}

/// At the end one of these forms of the tensor must be available.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Requirement {
    /// Tensor id.
    pub tensor: usize,
    /// Accepted forms.
    pub any_of: Vec<Form>,
}

/// The gradient must be available in the form in which the parameter was produced.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tie {
    /// Tensor id of the parameter.
    pub parameter: usize,
    /// Tensor id of its gradient.
    pub gradient: usize,
}

impl Tensor {
    /// What holding it costs if these forms are there: that of the cheaper one.
    pub fn kept(&self, produced: Form, moved: Option<Form>) -> i64 {
        let price = |form| self.keep.iter().find(|keep| keep.0 == form).map_or(0, |keep| keep.1);
        moved.map_or(price(produced), |form| price(form).min(price(produced)))
    }
}

/// The set of forms available from a tensor produced as `produced` and communicated to `moved`.
///
/// `{produced} ∪ {moved}`, and everything if that contains replicated: slicing and masking are local
/// and free.
pub fn availability(produced: Form, moved: Option<Form>) -> u32 {
    let mask = 1u32 << produced | moved.map_or(0, |form| 1u32 << form);
    if mask & 1 << IDENTITY == 0 { mask } else { u32::MAX }
}

#[cfg(test)]
mod tests {
    use super::*;
    #[test]
    fn identity_makes_everything_available() {
        assert_eq!(availability(0, None), u32::MAX);
        assert_eq!(availability(2, Some(0)), u32::MAX);
        assert_eq!(availability(1, Some(3)), 0b1010);
        assert_eq!(availability(2, None), 0b100);
    }
}
