//! What stands between the factors, on the device and in f32.

use burn_cubecl::cubecl;
use burn_cubecl::cubecl::prelude::*;

use crate::Activation;

/// `scale * activation(x)`, or `x` where nothing stands between.
#[cube]
pub(crate) fn between<N: Size>(
    x: Vector<f32, N>,
    scale: f32,
    #[comptime] activation: Option<Activation>,
) -> Vector<f32, N> {
    match comptime!(activation) {
        None => x,
        Some(Activation::Identity) => x * Vector::new(scale),
        Some(Activation::Silu) => x * sigmoid::<N>(x) * Vector::new(scale),
        Some(Activation::Gelu) => x * normal::<N>(x) * Vector::new(scale),
        Some(Activation::Relu) => max(x, Vector::new(0.0f32)) * Vector::new(scale),
    }
}

/// The derivative of [`between`] at `x`.
#[cube]
pub(crate) fn slope<N: Size>(
    x: Vector<f32, N>,
    scale: f32,
    #[comptime] activation: Activation,
) -> Vector<f32, N> {
    let one = Vector::<f32, N>::new(1.0f32);
    let slope = match comptime!(activation) {
        Activation::Identity => one,
        Activation::Silu => {
            let sigmoid = sigmoid::<N>(x);
            sigmoid * (one + x * (one - sigmoid))
        }
        Activation::Gelu => {
            let density = Vector::exp(x * x * Vector::new(-0.5f32)) * Vector::new(0.398_942_3f32);
            normal::<N>(x) + x * density
        }
        Activation::Relu => select_many(
            x.greater_than(Vector::new(0.0f32)),
            one,
            Vector::new(0.0f32),
        ),
    };
    slope * Vector::new(scale)
}

#[cube]
fn sigmoid<N: Size>(x: Vector<f32, N>) -> Vector<f32, N> {
    let one = Vector::<f32, N>::new(1.0f32);
    // Not `-x`: CUDA has no negation of vectors.
    one / (one + Vector::exp(x * Vector::new(-1.0f32)))
}

/// The cumulative normal distribution.
#[cube]
fn normal<N: Size>(x: Vector<f32, N>) -> Vector<f32, N> {
    let erf = Vector::erf(x * Vector::new(core::f32::consts::FRAC_1_SQRT_2));
    (erf + Vector::new(1.0f32)) * Vector::new(0.5f32)
}
