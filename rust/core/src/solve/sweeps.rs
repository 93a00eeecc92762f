//! How long the bound is swept, and what happens between sweeps: dives, reductions, messages moved on.

use super::{End, Search};
use crate::extrapolate::Moment;
use crate::model::Model;
use crate::reduced::Reduced;
use crate::trws::Sweeper;

/// Nothing dies in a sweep up to this limit.
const NO_LIMIT: i64 = i64::MAX >> 3;
/// A window of sweeps without fixing must raise the bound by more than this part.
const RISE: f64 = 1e-3;
/// A window of sweeps over the whole model must gain more than this of the gap.
const PATIENCE_OF_ALL: f64 = 0.1;
/// Sweeps between looks at the gain.
const WINDOW: u64 = 8;
/// At most so many sweeps lie between two dives of a warm search: where its incumbent is the best program, or nearly,
/// they find nothing.
const DIVES: u64 = 32;
/// The drift of a window of sweeps is continued by so many times itself: at least, at most.
const STRIDE: [i64; 2] = [2, 16];
/// Sweeps from messages moved on before they are compared with those as they were.
const TRIAL: usize = 2;
/// Sweeps from an earlier search's messages before they are compared with none: the two models differ in some edges,
/// and what does not match takes a few sweeps to even out.
const WARMING: usize = 8;

impl Search<'_, '_> {
    /// Sweeps over the whole model, which are cheap beside the reductions: what the bound excludes need not be
    /// reduced. First without fixing, so that every class keeps its message for the next search (`swept`), until the
    /// bound rises little; then with it, until a window gains little or most values are dead.
    pub(super) fn sweep_all(&mut self, model: &mut Model, swept: impl FnOnce(&Model)) -> Result<(), End> {
        let mut sweeper = Sweeper::new(model);
        let values = model.living_values();
        let window = if self.warm { WINDOW / 4 } else { WINDOW / 2 };
        let mut mark = sweeper.bound();
        for sweep in 1u64.. {
            self.sweep_once(&mut sweeper, model, NO_LIMIT)?;
            if sweeper.bound() > self.limit() {
                break;
            }
            if sweep.is_multiple_of(window) {
                let gain = sweeper.bound() - mark;
                mark = sweeper.bound();
                if gain as f64 <= RISE * sweeper.bound() as f64 {
                    break;
                }
            }
        }
        sweeper.store(model);
        swept(model);
        if model.constant > self.limit() {
            return Err(End::Proven);
        }
        self.dive(model)?;
        sweeper.load(model);
        mark = sweeper.bound();
        for sweep in 1u64.. {
            self.sweep_once(&mut sweeper, model, self.limit())?;
            if sweeper.bound() > self.limit() {
                return Err(End::Proven);
            }
            if sweep.is_multiple_of(window) {
                let gain = (sweeper.bound() - mark) as f64;
                mark = sweeper.bound();
                let little = gain <= PATIENCE_OF_ALL * (self.limit() - sweeper.bound()) as f64;
                if little || sweeper.living_values() * 4 < values {
                    break;
                }
            }
        }
        sweeper.store(model);
        self.dive(model)?;
        Ok(())
    }

    /// One sweep; `model` is given its terms where that ends the search.
    fn sweep_once(&mut self, sweeper: &mut Sweeper, model: &mut Model, limit: i64) -> Result<(), End> {
        let done = self.monitor.check().map_err(End::from).and_then(|()| {
            if !sweeper.sweep(limit, || self.monitor.check().is_ok())? {
                self.monitor.check()?;
            }
            Ok(())
        });
        if done.is_err() {
            sweeper.store(model);
            return done;
        }
        self.monitor.sweeps += 1;
        self.raise(sweeper.bound());
        Ok(())
    }

    /// Gives a reduced `model` the messages of an earlier one, if they lead to a higher bound than its own.
    pub(super) fn warm_up(&mut self, model: &mut Model, earlier: &Reduced) -> Result<(), End> {
        let own = Moment::of(model);
        if !earlier.load(model, self.built.shift) {
            own.restore(model);
            return Ok(());
        }
        let mut sweeper = Sweeper::new(model);
        let mut swept = [Moment::of(model), own];
        for start in &mut swept {
            start.restore(model);
            sweeper.load(model);
            for _ in 0..WARMING {
                self.sweep_once(&mut sweeper, model, NO_LIMIT)?;
            }
            sweeper.store(model);
            *start = Moment::of(model);
        }
        if swept[0].bound() > swept[1].bound() {
            swept[0].restore(model);
        }
        Ok(())
    }

    /// Keeps the messages of the reduced `model` for the next search, once.
    pub(super) fn leave(&mut self, model: &Model) {
        if self.reduced.is_none() {
            self.reduced = Some(Reduced::of(model, self.built.shift));
        }
    }

    /// Sweeps until a window gains less than `patience` of the gap; between windows the messages' drift is continued
    /// as far as that raises the bound.
    pub(super) fn sweep(&mut self, model: &mut Model, patience: f64) -> Result<(), End> {
        let mut sweeper = Sweeper::new(model);
        let mut values = model.living_values();
        let mut mark = model.constant;
        let mut before = Moment::of(model);
        let mut due = 1;
        let mut between = WINDOW;
        let most = if self.warm { DIVES } else { WINDOW };
        let mut stride = STRIDE[0];
        for sweep in 1u64.. {
            self.sweep_once(&mut sweeper, model, self.limit())?;
            if sweep == due {
                sweeper.store(model);
                let improved = self.dive(model)?;
                sweeper.load(model);
                between = if improved { WINDOW } else { (between * 2).min(most) };
                due = if sweep < WINDOW { sweep * 2 } else { sweep + between };
            }
            if sweeper.bound() > self.limit() {
                return Err(End::Proven);
            }
            if sweep.is_multiple_of(WINDOW) {
                sweeper.store(model);
                let gain = (model.constant - mark) as f64;
                mark = model.constant;
                if gain <= patience * (self.limit() - model.constant) as f64 {
                    return Ok(());
                }
                if model.living_values() * 5 < values * 4 {
                    self.leave(model);
                    self.squeeze(model)?;
                    values = model.living_values();
                    sweeper = Sweeper::new(model);
                } else {
                    let now = Moment::of(model);
                    let mut higher = before.onward(model, stride);
                    if higher {
                        sweeper.load(model);
                        for _ in 0..TRIAL {
                            self.sweep_once(&mut sweeper, model, self.limit())?;
                        }
                        higher = sweeper.bound() > now.bound();
                    }
                    if higher {
                        sweeper.store(model);
                        stride = (stride * 2).min(STRIDE[1]);
                    } else {
                        now.restore(model);
                        sweeper.load(model);
                        stride = (stride / 2).max(STRIDE[0]);
                    }
                }
                before = Moment::of(model);
            }
        }
        Ok(())
    }
}
