//! How close two results have to be: one table for every suite.

use burn::tensor::DType;

use crate::Matrix;

/// Half the distance between 1 and the next number is the rounding error of one operation; this is
/// the whole distance.
pub fn epsilon(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => f64::EPSILON,
        DType::F32 => f64::from(f32::EPSILON),
        DType::F16 => 2f64.powi(-10),
        DType::BF16 => 2f64.powi(-7),
        other => panic!("{other:?} is no float type"),
    }
}

/// The largest relative error that any comparison in `dtype` may allow.
pub fn limit(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-12,
        DType::F32 => 1e-5,
        _ => 16.0 * epsilon(dtype),
    }
}

/// The relative error allowed for a result behind `reduction` additions: an epsilon each, and 16
/// for products, activations and the additions of several projections after each other.
///
/// # Panics
///
/// When that is more than [`limit`]: the test's extents are too large for its claim.
pub fn tolerance(dtype: DType, reduction: usize) -> f64 {
    let tolerance = epsilon(dtype) * (16 + reduction) as f64;
    assert!(
        tolerance <= limit(dtype),
        "a reduction of {reduction} needs {tolerance:.1e} in {dtype:?}, more than {:.1e}",
        limit(dtype)
    );
    tolerance
}

/// The largest difference, relative to the largest magnitude of `expected`. Infinite when shapes
/// differ, when a value is not finite, or when zeros are expected and something else is found.
pub fn relative_error(found: &Matrix, expected: &Matrix) -> f64 {
    if (found.rows, found.columns) != (expected.rows, expected.columns) {
        return f64::INFINITY;
    }
    let difference = found.zip(expected, |a, b| a - b).magnitude();
    if difference == 0.0 {
        return 0.0;
    }
    let relative = difference / expected.magnitude();
    if relative.is_finite() {
        relative
    } else {
        f64::INFINITY
    }
}

/// Asserts that `found` is `expected` within [`tolerance`]. With `MOE_LORA_PRINT_ERRORS` set and
/// `--nocapture`, prints the error.
///
/// # Panics
///
/// When it is not.
pub fn assert_close(
    name: &str,
    found: &Matrix,
    expected: &Matrix,
    dtype: DType,
    reduction: usize,
) -> f64 {
    let (error, allowed) = (relative_error(found, expected), tolerance(dtype, reduction));
    assert!(
        error <= allowed,
        "{name}: relative error {error:.2e} is more than {allowed:.2e} in {dtype:?}\n   found [{}, {}] {:?}\nexpected [{}, {}] {:?}",
        found.rows,
        found.columns,
        found.values,
        expected.rows,
        expected.columns,
        expected.values,
    );
    if std::env::var_os("MOE_LORA_PRINT_ERRORS").is_some() {
        println!("{dtype:?} {error:.2e} of {allowed:.2e} {name}");
    }
    error
}

/// Asserts that a wrong result is seen as such by a wide margin: a hundredth of the expected
/// magnitude, a thousand times any tolerance in f32.
///
/// # Panics
///
/// When the wrong result is near the right one.
pub fn assert_far(name: &str, wrong: &Matrix, expected: &Matrix) {
    let error = relative_error(wrong, expected);
    assert!(
        error > 1e-2,
        "{name}: the wrong algebra differs by {error:.2e} only, the comparison proves nothing"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_relative_to_the_largest_magnitude_and_nothing_slips_through() {
        let matrix = |values: [f64; 2]| Matrix {
            rows: 1,
            columns: 2,
            values: values.into(),
        };
        let error = |found, expected| relative_error(&matrix(found), &matrix(expected));
        assert_eq!(error([4.0, 1.0], [4.0, 2.0]), 0.25);
        assert_eq!(error([0.0, -0.0], [0.0, 0.0]), 0.0);
        assert_eq!(error([0.0, 1e-30], [0.0, 0.0]), f64::INFINITY);
        assert_eq!(error([f64::NAN, 1.0], [1.0, 1.0]), f64::INFINITY);
        assert_eq!(error([1.0, 1.0], [f64::NAN, 1.0]), f64::INFINITY);
        let narrow = Matrix::zeros(1, 1);
        assert_eq!(relative_error(&narrow, &matrix([0.0; 2])), f64::INFINITY);
    }

    #[test]
    fn the_table_stays_within_the_limits() {
        assert!(tolerance(DType::F32, 60) <= 1e-5);
        assert!(tolerance(DType::F64, 4000) <= 1e-12);
    }

    #[test]
    #[should_panic(expected = "more than 1.0e-5")]
    fn a_reduction_too_long_for_the_limit_is_refused() {
        tolerance(DType::F32, 100);
    }
}
