//! Time of something that moves bytes.

use serde::Serialize;

/// `start + bytes / rate`: a kernel or a collective.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Cost {
    /// Time of no bytes, microseconds: launch, filling and draining of the device, latency.
    pub start_us: f64,
    /// Bytes a second in the long run.
    pub bytes_per_s: f64,
}

impl Cost {
    /// Microseconds of so many bytes.
    pub fn us(&self, bytes: f64) -> f64 {
        self.start_us + bytes / self.bytes_per_s * 1e6
    }

    /// The cost with the least squares of relative errors over `(bytes, us)`; `None` when all have
    /// the same bytes, or when more bytes do not take longer.
    pub fn fit(measured: &[(f64, f64)]) -> Option<Self> {
        let first = measured.first()?.0;
        if measured.iter().all(|(bytes, _)| *bytes == first) {
            return None;
        }
        // Normal equations of start / us + slope * bytes / us = 1.
        let sum = |f: fn(f64, f64) -> f64| measured.iter().map(|(b, us)| f(*b, *us)).sum::<f64>();
        let (uu, uv, vv) = (
            sum(|_, us| 1.0 / (us * us)),
            sum(|b, us| b / (us * us)),
            sum(|b, us| b * b / (us * us)),
        );
        let (u, v) = (sum(|_, us| 1.0 / us), sum(|b, us| b / us));
        let start_us = ((u * vv - v * uv) / (uu * vv - uv * uv)).max(0.0);
        let slope = (v - start_us * uv) / vv;
        (slope > 0.0 && slope.is_finite()).then_some(Self {
            start_us,
            bytes_per_s: 1e6 / slope,
        })
    }

    /// As [`fit`](Self::fit), with a rate that is known: what is left of the times is the start.
    pub fn with_rate(bytes_per_s: f64, measured: &[(f64, f64)]) -> Self {
        let left = measured
            .iter()
            .map(|(bytes, us)| us - bytes / bytes_per_s * 1e6);
        Self {
            start_us: (left.sum::<f64>() / measured.len().max(1) as f64).max(0.0),
            bytes_per_s,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fit_finds_the_line_that_times_lie_on() {
        let line = Cost {
            start_us: 4.0,
            bytes_per_s: 2e12,
        };
        let measured = [1e6, 1e7, 3e8].map(|bytes| (bytes, line.us(bytes)));
        let fit = Cost::fit(&measured).unwrap();
        assert!((fit.start_us - 4.0).abs() < 1e-9, "{fit:?}");
        assert!((fit.bytes_per_s / 2e12 - 1.0).abs() < 1e-9, "{fit:?}");
        let fit = Cost::with_rate(2e12, &measured);
        assert!((fit.start_us - 4.0).abs() < 1e-9, "{fit:?}");
    }

    #[test]
    fn one_size_or_falling_times_have_no_fit() {
        assert_eq!(Cost::fit(&[]), None);
        assert_eq!(Cost::fit(&[(1e6, 3.0), (1e6, 4.0)]), None);
        assert_eq!(Cost::fit(&[(1e6, 30.0), (1e9, 0.001)]), None);
    }

    #[test]
    fn times_below_the_line_through_zero_start_at_nothing() {
        let fit = Cost::fit(&[(1e6, 1.0), (1e7, 20.0)]).unwrap();
        assert_eq!(fit.start_us, 0.0);
    }
}
