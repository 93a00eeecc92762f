//! Synthetic joint graphs (forward, loss, backward) of transformers, with rules and costs in the manner
//! of the real ones: 4 devices of speed 4:2:1:1, ratios proportional to speed.

use std::collections::BTreeMap;

use hetspmd_search::problem::{Instruction, Move, Problem, Requirement, Row, Tensor, Tie};

/// Sizes of a model.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    pub layers: usize,
    pub batch: u64,
    pub sequence: u64,
    pub hidden: u64,
    pub heads: u64,
    pub vocabulary: u64,
    /// Picoseconds per byte of a link.
    pub byte: f64,
    /// Picoseconds per message.
    pub latency: f64,
    /// Relative noise on every cost, so that layers differ.
    pub noise: f64,
}

impl Config {
    /// Like BERT base with this many layers.
    pub fn base(layers: usize) -> Self {
        Self {
            layers,
            batch: 32,
            sequence: 128,
            hidden: 768,
            heads: 12,
            vocabulary: 30522,
            byte: 770.0,
            latency: 50e6,
            noise: 0.0,
        }
    }
}

const SHARES: [f64; 4] = [0.5, 0.25, 0.125, 0.125];
const FLOP: [f64; 4] = [0.08, 0.16, 0.32, 0.32]; // ps
const MEMORY: f64 = 1.5; // ps per byte
const LAUNCH: f64 = 5e6;

/// An axis name; sizes are looked up.
type Axis = char;
type Id = usize;

#[derive(Clone)]
enum Op {
    /// Multilinear in its inputs.
    Einsum,
    /// Elementwise sum.
    Add,
    /// Elementwise or rowwise; the listed axes are never sharded.
    Pointwise(&'static str),
}

struct Step {
    op: Op,
    inputs: Vec<Id>,
    output: Id,
}

struct Builder {
    config: Config,
    /// State of the noise (xorshift).
    seed: std::cell::Cell<u64>,
    sizes: BTreeMap<Axis, u64>,
    axes: Vec<String>,
    problem: Problem,
    tape: Vec<Step>,
    needs_gradient: Vec<bool>,
}

/// The problem of one training step.
pub fn transformer(config: Config) -> Problem {
    let c = config;
    let sizes = [
        ('b', c.batch),
        ('s', c.sequence),
        ('t', c.sequence),
        ('h', c.hidden),
        ('k', c.hidden),
        ('n', c.heads),
        ('d', c.hidden / c.heads),
        ('f', 4 * c.hidden),
        ('v', c.vocabulary),
    ];
    let empty =
        Problem { version: 1, tensors: vec![], instructions: vec![], requirements: vec![], ties: vec![] };
    let mut g = Builder {
        config,
        seed: std::cell::Cell::new(0x9E37_79B9_7F4A_7C15),
        sizes: sizes.into_iter().collect(),
        axes: vec![],
        problem: empty,
        tape: vec![],
        needs_gradient: vec![],
    };
    let loss = g.forward(c.layers);
    g.problem.requirements.push(Requirement { tensor: loss, any_of: vec![1] });
    g.backward(loss);
    g.problem
}

impl Builder {
    fn forward(&mut self, layers: usize) -> Id {
        let tokens = self.source("tokens", "bs", false);
        let words = self.source("words", "vh", true);
        let mut x = self.apply("embedding", Op::Einsum, &[tokens, words], "bsh");
        let mask = self.source("mask", "bt", false);
        for layer in 0..layers {
            let p = |name: &str| format!("l{layer}.{name}");
            let mut heads = Vec::new();
            for (part, axes) in [("q", "bsnd"), ("k", "btnd"), ("v", "btnd")] {
                let projected = self.linear(&p(part), x, "hk", "bsk");
                let viewed = self.view(&p(&format!("{part}.view")), projected, axes);
                let order = if part == "q" { "bnsd" } else { "bntd" };
                heads.push(self.apply(&p(&format!("{part}.transpose")), Op::Einsum, &[viewed], order));
            }
            let scores = self.apply(&p("scores"), Op::Einsum, &[heads[0], heads[1]], "bnst");
            let scaled = self.apply(&p("scale"), Op::Einsum, &[scores], "bnst");
            let masked = self.apply(&p("mask"), Op::Pointwise(""), &[scaled, mask], "bnst");
            let softmax = self.apply(&p("softmax"), Op::Pointwise("t"), &[masked], "bnst");
            let dropped = self.apply(&p("dropout"), Op::Einsum, &[softmax], "bnst");
            let context = self.apply(&p("context"), Op::Einsum, &[dropped, heads[2]], "bnsd");
            let back = self.apply(&p("merge"), Op::Einsum, &[context], "bsnd");
            let merged = self.view(&p("merge.view"), back, "bsk");
            let out = self.linear(&p("out"), merged, "kh", "bsh");
            let dropped = self.apply(&p("out.dropout"), Op::Einsum, &[out], "bsh");
            let sum = self.apply(&p("residual1"), Op::Add, &[x, dropped], "bsh");
            let normed = self.norm(&p("norm1"), sum);
            let wide = self.linear(&p("fc1"), normed, "hf", "bsf");
            let active = self.apply(&p("gelu"), Op::Pointwise(""), &[wide], "bsf");
            let narrow = self.linear(&p("fc2"), active, "fh", "bsh");
            let dropped = self.apply(&p("fc2.dropout"), Op::Einsum, &[narrow], "bsh");
            let sum = self.apply(&p("residual2"), Op::Add, &[normed, dropped], "bsh");
            x = self.norm(&p("norm2"), sum);
        }
        let logits = self.apply("logits", Op::Einsum, &[x, words], "bsv");
        let log = self.apply("log_softmax", Op::Pointwise("v"), &[logits], "bsv");
        let labels = self.source("labels", "bs", false);
        let picked = self.apply("nll", Op::Einsum, &[log, labels], "bs");
        self.apply("loss", Op::Einsum, &[picked], "")
    }

    fn linear(&mut self, name: &str, x: Id, weight: &str, out: &str) -> Id {
        let w = self.source(&format!("{name}.weight"), weight, true);
        let bias = self.source(&format!("{name}.bias"), &weight[1..], true);
        let product = self.apply(&format!("{name}.mm"), Op::Einsum, &[x, w], out);
        self.apply(&format!("{name}.add"), Op::Pointwise(""), &[product, bias], out)
    }

    fn norm(&mut self, name: &str, x: Id) -> Id {
        let weight = self.source(&format!("{name}.weight"), "h", true);
        let bias = self.source(&format!("{name}.bias"), "h", true);
        let normed = self.apply(name, Op::Pointwise("h"), &[x], "bsh");
        let scaled = self.apply(&format!("{name}.mul"), Op::Einsum, &[normed, weight], "bsh");
        self.apply(&format!("{name}.add"), Op::Pointwise(""), &[scaled, bias], "bsh")
    }

    /// `k` (and `h` after the view back) is `n d`; only `n` may be sharded. Modelled as a renaming.
    fn view(&mut self, name: &str, x: Id, axes: &str) -> Id {
        let id = self.tensor(name, axes, self.needs_gradient[x]);
        self.emit_view(name, x, id);
        self.tape.push(Step { op: Op::Pointwise("view"), inputs: vec![x], output: id });
        id
    }

    fn emit_view(&mut self, name: &str, x: Id, id: Id) {
        let count = self.bytes(id) / 4.0;
        let mut rows = vec![self.row(vec![0], 0, count, None), self.row(vec![1], 1, count, None)];
        for dim in 0..3 {
            rows.push(self.row(vec![2 + dim], 2 + dim, count, Some(())));
        }
        let (inputs, outputs) = (vec![x], vec![id]);
        self.problem.instructions.push(Instruction { name: name.into(), inputs, outputs, rows });
    }

    fn source(&mut self, name: &str, axes: &str, parameter: bool) -> Id {
        let id = self.tensor(name, axes, parameter);
        let mut forms = vec![0u8];
        forms.extend((0..axes.len() as u8).map(|dim| 2 + dim));
        let rows =
            forms.into_iter().map(|form| Row { pre: vec![], post: vec![form], ..Row::default() }).collect();
        self.problem.instructions.push(Instruction {
            name: name.into(),
            inputs: vec![],
            outputs: vec![id],
            rows,
        });
        if parameter {
            self.problem.ties.push(Tie { parameter: id, gradient: usize::MAX });
        }
        id
    }

    fn bytes(&self, id: Id) -> f64 {
        4.0 * self.axes[id].chars().map(|axis| self.sizes[&axis] as f64).product::<f64>()
    }

    fn tensor(&mut self, name: &str, axes: &str, needs_gradient: bool) -> Id {
        let id = self.axes.len();
        self.axes.push(axes.to_owned());
        self.needs_gradient.push(needs_gradient);
        let bytes = self.bytes(id);
        let mut moves = Vec::new();
        let (latency, byte) = (self.config.latency, self.config.byte);
        let mut push = |from: u8, to: u8, kind: &str, cost: f64| {
            moves.push(Move(from, to, kind.into(), (cost * self.noise()) as i64));
        };
        let padded = latency * 3.0 + 3.0 * SHARES[0] * bytes * byte;
        let grouped = latency * 8.0 + bytes * byte;
        push(1, 0, "all_reduce", latency * 6.0 + 1.5 * bytes * byte);
        for dim in 0..axes.len() as u8 {
            let tilt = 1.0 + f64::from(dim) * 0.05; // copies where the dimension is not the outermost
            push(2 + dim, 0, "all_gather_padded", padded * tilt);
            push(2 + dim, 0, "all_gather_grouped", grouped * tilt);
            push(1, 2 + dim, "reduce_scatter_padded", padded * tilt);
            push(1, 2 + dim, "reduce_scatter_grouped", grouped * tilt);
            for other in (0..axes.len() as u8).filter(|&other| other != dim) {
                push(2 + dim, 2 + other, "all_to_all", latency * 3.0 + 0.5 * bytes * byte);
            }
        }
        self.problem.tensors.push(Tensor { name: name.to_owned(), moves, keep: vec![] });
        id
    }

    fn noise(&self) -> f64 {
        let mut x = self.seed.get();
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        self.seed.set(x);
        1.0 + self.config.noise * ((x >> 11) as f64 / (1u64 << 53) as f64 - 0.5)
    }

    fn row(&self, pre: Vec<u8>, post: u8, flops: f64, sharded: Option<()>) -> Row {
        let device = |j: usize| {
            let share = if sharded.is_some() { SHARES[j] } else { 1.0 };
            (flops * FLOP[j] * share).max(flops.min(1e9) * 4.0 * MEMORY * share * 0.1)
        };
        let cost = LAUNCH + (0..4).map(device).fold(0.0, f64::max);
        Row { pre, post: vec![post], cost: (cost * self.noise()) as i64, direct: false }
    }

    fn apply(&mut self, name: &str, op: Op, inputs: &[Id], axes: &str) -> Id {
        let needs = inputs.iter().any(|&id| self.needs_gradient[id]);
        let id = self.tensor(name, axes, needs);
        self.emit(name, &op, inputs, id, None);
        self.tape.push(Step { op, inputs: inputs.to_vec(), output: id });
        id
    }

    /// Adds the instruction; `linear`: the only argument that may be a summand (default: by op).
    fn emit(&mut self, name: &str, op: &Op, inputs: &[Id], output: Id, linear: Option<usize>) {
        let axes: Vec<Vec<char>> = inputs.iter().map(|&id| self.axes[id].chars().collect()).collect();
        let out: Vec<char> = self.axes[output].chars().collect();
        let mut all: Vec<char> = axes.iter().flatten().copied().chain(out.iter().copied()).collect();
        all.sort_unstable();
        all.dedup();
        let size = all.iter().map(|axis| self.sizes[axis] as f64).product::<f64>();
        let flops = if inputs.len() > 1 && matches!(op, Op::Einsum) { 2.0 * size } else { size };
        let form = |axes: &[char], axis: char| {
            axes.iter().position(|&other| other == axis).map_or(0, |dim| 2 + dim as u8)
        };
        let blocked = if let Op::Pointwise(blocked) = op { *blocked } else { "" };
        let mut rows = vec![self.row(vec![0; inputs.len()], 0, flops, None)];
        for &axis in all.iter().filter(|&&axis| !blocked.contains(axis)) {
            let pre = axes.iter().map(|axes| form(axes, axis)).collect();
            let post = if out.contains(&axis) { form(&out, axis) } else { 1 };
            rows.push(self.row(pre, post, flops, Some(())));
        }
        match (op, linear) {
            (Op::Einsum, None) => {
                for position in 0..inputs.len() {
                    rows.push(self.summand(inputs.len(), position, flops));
                }
            }
            (Op::Add, _) => rows.push(self.row(vec![1; inputs.len()], 1, flops, None)),
            (_, Some(position)) => rows.push(self.summand(inputs.len(), position, flops)),
            _ => {}
        }
        let (inputs, outputs) = (inputs.to_vec(), vec![output]);
        self.problem.instructions.push(Instruction { name: name.into(), inputs, outputs, rows });
    }

    fn summand(&self, count: usize, position: usize, flops: f64) -> Row {
        let pre = (0..count).map(|other| u8::from(other == position)).collect();
        self.row(pre, 1, flops, None)
    }

    fn backward(&mut self, loss: Id) {
        let seed = self.source("seed", "", false);
        let mut gradients: BTreeMap<Id, Id> = BTreeMap::from([(loss, seed)]);
        for step in std::mem::take(&mut self.tape).into_iter().rev() {
            let Some(&gradient) = gradients.get(&step.output) else { continue };
            for (position, &input) in step.inputs.iter().enumerate() {
                if !self.needs_gradient[input] {
                    continue;
                }
                let name = format!("d{}.{position}", self.problem.tensors[step.output].name);
                let part = self.gradient(&name, &step, position, gradient);
                let total = match gradients.get(&input) {
                    None => part,
                    Some(&other) => {
                        let axes = self.axes[input].clone();
                        let id = self.tensor(&format!("{name}.accumulate"), &axes, false);
                        self.emit(&format!("{name}.accumulate"), &Op::Add, &[other, part], id, None);
                        id
                    }
                };
                gradients.insert(input, total);
            }
        }
        for tie in &mut self.problem.ties {
            tie.gradient = gradients[&tie.parameter];
        }
    }

    fn gradient(&mut self, name: &str, step: &Step, position: usize, gradient: Id) -> Id {
        let input = step.inputs[position];
        let axes = self.axes[input].clone();
        if matches!(step.op, Op::Add) {
            return gradient;
        }
        let id = self.tensor(name, &axes, false);
        match step.op {
            Op::Pointwise("view") => self.emit_view(name, gradient, id),
            Op::Einsum => {
                let mut inputs = vec![gradient];
                inputs
                    .extend(step.inputs.iter().enumerate().filter(|&(p, _)| p != position).map(|(_, &i)| i));
                self.emit(name, &Op::Einsum, &inputs, id, None);
            }
            _ if self.axes[gradient] != axes => self.emit(name, &Op::Einsum, &[gradient], id, None),
            _ => self.emit(name, &step.op, &[gradient, input], id, Some(0)),
        }
        id
    }
}
