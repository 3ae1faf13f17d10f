//! The six grouped products of an adapter, and the bytes that each moves.

/// A product of an adapter's forward or backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// `z = x A^T`.
    Shrink,
    /// `y += s z B^T`, into the base's output.
    Expand,
    /// `dz = s dy B`.
    Dz,
    /// `dx = dz A`.
    Dx,
    /// `dA = dz^T x`.
    Da,
    /// `dB = s dy^T z`.
    Db,
}

impl Kernel {
    /// All six, those of the forward pass first.
    pub const ALL: [Self; 6] = [
        Self::Shrink,
        Self::Expand,
        Self::Dz,
        Self::Dx,
        Self::Da,
        Self::Db,
    ];
    /// Those of the forward pass.
    pub const FORWARD: [Self; 2] = [Self::Shrink, Self::Expand];
    /// Those of the backward pass.
    pub const BACKWARD: [Self; 4] = [Self::Dz, Self::Dx, Self::Da, Self::Db];

    /// As it is called in the bench's rows.
    pub fn name(self) -> &'static str {
        match self {
            Self::Shrink => "shrink",
            Self::Expand => "expand",
            Self::Dz => "dz",
            Self::Dx => "dx",
            Self::Da => "dA",
            Self::Db => "dB",
        }
    }
}

/// One rank's part of a projection with an adapter on it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Projection {
    /// Rows of the input.
    pub rows: f64,
    /// Experts that have factors here.
    pub experts: f64,
    /// Columns of the input.
    pub d_in: f64,
    /// Rows of the rank's `A`.
    pub rank_a: f64,
    /// Rank of the adapter, columns of `B`.
    pub rank: f64,
    /// Columns of the delta.
    pub d_out: f64,
}

/// Bytes of an element: bf16.
pub(crate) const ELEMENT: f64 = 2.0;

impl Projection {
    /// Elements of both factors.
    pub fn factors(&self) -> f64 {
        self.experts * (self.rank_a * self.d_in + self.d_out * self.rank)
    }

    /// Bytes that a kernel reads and writes, each operand once.
    pub fn bytes(&self, kernel: Kernel) -> f64 {
        let a_side = self.rows * (self.d_in + self.rank_a) + self.experts * self.rank_a * self.d_in;
        let b_side = self.rows * (self.rank + self.d_out) + self.experts * self.d_out * self.rank;
        ELEMENT
            * match kernel {
                Kernel::Shrink | Kernel::Dx | Kernel::Da => a_side,
                Kernel::Dz | Kernel::Db => b_side,
                // The slice of the base is read and written.
                Kernel::Expand => b_side + self.rows * self.d_out,
            }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A projection of the bench: two ranks of hidden 2048, ffn 2688, rank 32.
    pub(crate) fn bench(name: &str, tokens: f64, experts: f64) -> Projection {
        let [d_in, rank_a, d_out] = match name {
            "fc2" => [1344.0, 32.0, 1024.0],
            _ => [2048.0, 16.0, 1344.0],
        };
        Projection {
            rows: tokens,
            experts,
            d_in,
            rank_a,
            rank: 32.0,
            d_out,
        }
    }

    #[test]
    fn bytes_are_those_that_the_bench_counts() {
        let fc2 = bench("fc2", 4096.0, 4.0);
        assert_eq!(fc2.bytes(Kernel::Shrink), 11_616_256.0);
        assert_eq!(fc2.bytes(Kernel::Expand), 17_301_504.0);
        let fc1 = bench("fc1", 65536.0, 64.0);
        assert_eq!(fc1.bytes(Kernel::Shrink), 274_726_912.0);
        assert_eq!(fc1.bytes(Kernel::Expand), 362_020_864.0);
    }
}
