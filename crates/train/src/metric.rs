//! Numbers of a step as curves of burn-train's dashboard.

use std::fmt;
use std::sync::Arc;

use burn::train::metric::state::{FormatOptions, NumericMetricState};
use burn::train::metric::{
    Metric, MetricAttributes, MetricMetadata, MetricName, Numeric, NumericAttributes, NumericEntry,
    SerializedEntry,
};

use crate::StepStats;

/// One number of every step's [`StepStats`], and its mean over an epoch.
///
/// ```
/// use burn::train::metric::Metric;
/// use moe_lora_train::AdapterMetric;
///
/// let spread = AdapterMetric::new("Busiest expert of layer 0", |stats| {
///     stats.loads[0].tokens.iter().max().map_or(0.0, |most| *most as f64)
/// });
/// assert_eq!(*spread.name(), "Busiest expert of layer 0");
/// ```
#[derive(Clone)]
pub struct AdapterMetric {
    name: MetricName,
    read: Arc<dyn Fn(&StepStats) -> f64 + Send + Sync>,
    state: NumericMetricState,
}

impl AdapterMetric {
    /// The number that `read` makes of a step; NaN where there is none.
    pub fn new(
        name: impl Into<String>,
        read: impl Fn(&StepStats) -> f64 + Send + Sync + 'static,
    ) -> Self {
        Self {
            name: Arc::new(name.into()),
            read: Arc::new(read),
            state: NumericMetricState::new(),
        }
    }

    /// The loss, under the name that burn-train has for it.
    pub fn loss() -> Self {
        Self::new("Loss", |stats| stats.loss)
    }

    /// The norm of all gradients, before clipping.
    pub fn gradient_norm() -> Self {
        let none = f64::NAN;
        Self::new("Gradient norm", move |stats| {
            stats.gradient_norm.unwrap_or(none)
        })
    }

    /// The norm of all deltas.
    pub fn adapter_norm() -> Self {
        Self::new("Adapter norm", StepStats::adapter_norm)
    }

    /// The norm of the delta of a linear, over its experts.
    pub fn adapter_norm_of(linear: impl Into<String>) -> Self {
        let linear = linear.into();
        let name = format!("Adapter norm of {linear}");
        Self::new(name, move |stats| {
            let norms = stats.adapters.iter().find(|norms| norms.linear == linear);
            norms.map_or(f64::NAN, |norms| norms.total())
        })
    }

    /// The norm of the delta of one global expert of a linear.
    pub fn adapter_norm_of_expert(linear: impl Into<String>, expert: usize) -> Self {
        let linear = linear.into();
        let name = format!("Adapter norm of {linear}, expert {expert}");
        Self::new(name, move |stats| {
            let norms = stats.adapters.iter().find(|norms| norms.linear == linear);
            let norm = norms.and_then(|norms| norms.experts.get(expert));
            norm.copied().unwrap_or(f64::NAN)
        })
    }

    /// The tokens of one global expert of an MoE layer, counted from 0 over those that
    /// [`Finetune::counters`](crate::Finetune::counters) gives.
    pub fn tokens_of_expert(layer: usize, expert: usize) -> Self {
        let name = format!("Tokens of MoE layer {layer}, expert {expert}");
        Self::new(name, move |stats| {
            let load = stats.loads.get(layer);
            let tokens = load.and_then(|load| load.tokens.get(expert));
            tokens.map_or(f64::NAN, |tokens| *tokens as f64)
        })
    }

    /// Experts of all layers without tokens.
    pub fn idle_experts() -> Self {
        Self::new("Experts without tokens", |stats| {
            stats.idle_experts() as f64
        })
    }

    /// Tokens of the busiest expert over the mean, in the layer where that is largest.
    pub fn imbalance() -> Self {
        Self::new("Load imbalance", StepStats::imbalance)
    }
}

impl fmt::Debug for AdapterMetric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AdapterMetric({:?})", self.name)
    }
}

impl Metric for AdapterMetric {
    type Input = StepStats;

    fn name(&self) -> MetricName {
        self.name.clone()
    }

    fn attributes(&self) -> MetricAttributes {
        let attributes = NumericAttributes {
            unit: None,
            higher_is_better: false,
        };
        attributes.into()
    }

    fn update(&mut self, stats: &StepStats, _: &MetricMetadata) -> SerializedEntry {
        let format = FormatOptions::new(self.name()).precision(4);
        self.state.update((self.read)(stats), 1, format)
    }

    fn clear(&mut self) {
        self.state.reset();
    }
}

impl Numeric for AdapterMetric {
    fn value(&self) -> NumericEntry {
        self.state.current_value()
    }

    fn running_value(&self) -> NumericEntry {
        self.state.running_value()
    }
}
