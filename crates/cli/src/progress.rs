//! A bar on standard error.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// How far long work is; gone when it is dropped.
pub struct Progress {
    bar: ProgressBar,
}

impl Progress {
    /// A bar of `total` units.
    pub fn new(what: &'static str, total: usize, shown: bool) -> Self {
        let target = match shown {
            true => ProgressDrawTarget::stderr(),
            false => ProgressDrawTarget::hidden(),
        };
        let bar = ProgressBar::with_draw_target(Some(total as u64), target).with_message(what);
        if let Ok(style) = ProgressStyle::with_template("{msg} {bar:30} {percent}%  {eta} left") {
            bar.set_style(style);
        }
        Self { bar }
    }

    /// So many units are done.
    pub fn done(&self, units: usize) {
        self.bar.set_position(units as u64);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
