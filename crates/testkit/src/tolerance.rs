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

/// The largest error that any comparison in `dtype` may allow.
pub fn limit(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-12,
        DType::F32 => 1e-5,
        _ => 1e-2,
    }
}

/// The [`error`] allowed for a result behind `reduction` additions: an epsilon each, and 16
/// for products, activations and the additions of several projections after each other. In half
/// precision [`limit`], whatever the reduction: it is in f32 there.
///
/// # Panics
///
/// When that is more than [`limit`]: the test's extents are too large for its claim.
pub fn tolerance(dtype: DType, reduction: usize) -> f64 {
    if is_half(dtype) {
        return limit(dtype);
    }
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

/// The norm of the difference, relative to the norm of `expected`; otherwise as [`relative_error`].
pub fn norm_error(found: &Matrix, expected: &Matrix) -> f64 {
    if (found.rows, found.columns) != (expected.rows, expected.columns) {
        return f64::INFINITY;
    }
    let difference = found.zip(expected, |a, b| a - b);
    if difference.magnitude() == 0.0 {
        return 0.0;
    }
    let relative = (difference.dot(&difference) / expected.dot(expected)).sqrt();
    if relative.is_finite() {
        relative
    } else {
        f64::INFINITY
    }
}

/// The error that [`tolerance`] is for: by the largest element, in half precision by norms.
pub fn error(found: &Matrix, expected: &Matrix, dtype: DType) -> f64 {
    match is_half(dtype) {
        true => norm_error(found, expected),
        false => relative_error(found, expected),
    }
}

fn is_half(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16)
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
    let (error, allowed) = (error(found, expected, dtype), tolerance(dtype, reduction));
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

/// Asserts that all results of one case are as expected, by name.
///
/// As [`assert_close`] each; in half precision the root mean square of their errors is within
/// [`limit`], and none is beyond three times that: behind a dozen roundings single ones scatter.
///
/// # Panics
///
/// When they are not.
pub fn assert_all_close(
    name: &str,
    results: &[(String, &Matrix, &Matrix)],
    dtype: DType,
    reduction: usize,
) {
    if !is_half(dtype) {
        for (what, found, expected) in results {
            assert_close(
                &format!("{name}: {what}"),
                found,
                expected,
                dtype,
                reduction,
            );
        }
        return;
    }
    let errors = results.iter();
    let errors: Vec<_> = errors
        .map(|(what, found, expected)| (norm_error(found, expected), what))
        .collect();
    let squares: f64 = errors.iter().map(|(error, _)| error * error).sum();
    let mean = (squares / errors.len() as f64).sqrt();
    let largest = errors.iter().map(|(error, _)| *error).fold(0.0, f64::max);
    assert!(
        mean <= limit(dtype) && largest <= 3.0 * limit(dtype),
        "{name}: relative errors {errors:?} in {dtype:?} have a root mean square of {mean:.2e}, more than {:.1e}, or one is three times that",
        limit(dtype)
    );
    if std::env::var_os("MOE_LORA_PRINT_ERRORS").is_some() {
        println!("{dtype:?} {mean:.2e} of {:.2e} {name}", limit(dtype));
    }
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
        let norms = |found, expected| norm_error(&matrix(found), &matrix(expected));
        assert_eq!(norms([3.0, 5.0], [3.0, 4.0]), 0.2);
        assert_eq!(norms([0.0, -0.0], [0.0, 0.0]), 0.0);
        assert_eq!(norms([0.0, 1e-30], [0.0, 0.0]), f64::INFINITY);
        assert_eq!(norms([f64::NAN, 1.0], [1.0, 1.0]), f64::INFINITY);
        let narrow = Matrix::zeros(1, 1);
        assert_eq!(relative_error(&narrow, &matrix([0.0; 2])), f64::INFINITY);
    }

    #[test]
    #[should_panic(expected = "root mean square of 1.77e-2")]
    fn one_result_of_eight_that_is_a_twentieth_off_is_seen_in_half_precision() {
        let (right, wrong) = (Matrix::build(2, 2, |i, j| (1 + i + j) as f64), 1.05);
        let wrong = right.scaled(wrong);
        let mut results = vec![("right".to_string(), &right, &right); 7];
        assert_all_close("seven", &results, DType::BF16, 1000);
        results.push(("wrong".to_string(), &wrong, &right));
        assert_all_close("eight", &results, DType::BF16, 1000);
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
