//! How a stacked parameter holds the matrices of all experts.

/// How the experts lie in `mlp.experts.gate_up_proj` and `mlp.experts.down_proj`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stacked {
    /// Whether a weight is `[E, d_in, d_out]` instead of `[E, d_out, d_in]`.
    pub transposed: bool,
    /// Whether the outputs of gate and up take turns, gate first, instead of all of gate coming
    /// before all of up.
    pub interleaved: bool,
    /// Whether there are `gate_up_proj_bias` `[E, 2F]` and `down_proj_bias` `[E, H]`.
    pub biases: bool,
}

impl Stacked {
    /// The shape of a parameter for matrices of `[d_out, d_in]`.
    pub(crate) fn shape(self, experts: usize, [d_out, d_in]: [usize; 2]) -> [usize; 3] {
        match self.transposed {
            true => [experts, d_in, d_out],
            false => [experts, d_out, d_in],
        }
    }

    /// Turns one expert's matrix from how it is stored into `[d_out, d_in]`.
    pub(crate) fn upright(self, matrix: &mut [f32], [d_out, d_in]: [usize; 2]) {
        if self.transposed {
            transpose(matrix, [d_in, d_out]);
        }
    }

    /// The inverse of [`upright`](Self::upright).
    pub(crate) fn as_stored(self, matrix: &mut [f32], [d_out, d_in]: [usize; 2]) {
        if self.transposed {
            transpose(matrix, [d_out, d_in]);
        }
    }

    /// Appends the rows of `gate_up`, `width` elements each, to `gate` and `up`.
    pub(crate) fn split(
        self,
        gate_up: &[f32],
        width: usize,
        gate: &mut Vec<f32>,
        up: &mut Vec<f32>,
    ) {
        if self.interleaved {
            for pair in gate_up.chunks_exact(2 * width) {
                gate.extend(&pair[..width]);
                up.extend(&pair[width..]);
            }
        } else {
            let (first, second) = gate_up.split_at(gate_up.len() / 2);
            gate.extend(first);
            up.extend(second);
        }
    }

    /// Appends the rows of both to `gate_up`, the inverse of [`split`](Self::split).
    pub(crate) fn join(self, gate: &[f32], up: &[f32], width: usize, gate_up: &mut Vec<f32>) {
        if self.interleaved {
            for (gate, up) in gate.chunks_exact(width).zip(up.chunks_exact(width)) {
                gate_up.extend(gate);
                gate_up.extend(up);
            }
        } else {
            gate_up.extend(gate);
            gate_up.extend(up);
        }
    }
}

/// Turns a matrix of `[rows, columns]` into its transpose.
fn transpose(matrix: &mut [f32], [rows, columns]: [usize; 2]) {
    // Rows read together, so that whole cache lines are written.
    const BAND: usize = 16;
    let source = matrix.to_vec();
    for band in (0..rows).step_by(BAND) {
        for column in 0..columns {
            for row in band..rows.min(band + BAND) {
                matrix[column * rows + row] = source[row * columns + column];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GPT_OSS: Stacked = Stacked {
        transposed: true,
        interleaved: true,
        biases: true,
    };

    #[test]
    fn columns_of_gate_and_up_take_turns() {
        // [d_in, 2F] with F = 2: columns g0 u0 g1 u1, tens count d_in.
        let stored = [
            1.0, 2.0, 3.0, 4.0, 11.0, 12.0, 13.0, 14.0, 21.0, 22.0, 23.0, 24.0,
        ];
        let mut matrix = stored.to_vec();
        GPT_OSS.upright(&mut matrix, [4, 3]);
        let (mut gate, mut up) = (Vec::new(), Vec::new());
        GPT_OSS.split(&matrix, 3, &mut gate, &mut up);
        assert_eq!(gate, [1.0, 11.0, 21.0, 3.0, 13.0, 23.0]);
        assert_eq!(up, [2.0, 12.0, 22.0, 4.0, 14.0, 24.0]);

        let mut joined = Vec::new();
        GPT_OSS.join(&gate, &up, 3, &mut joined);
        GPT_OSS.as_stored(&mut joined, [4, 3]);
        assert_eq!(joined, stored);

        // Negative control: halves have the right shape and are wrong.
        let (first, _) = matrix.split_at(6);
        assert_eq!(first.len(), gate.len());
        assert_ne!(first, gate);
    }

    #[test]
    fn a_transpose_goes_over_the_edge_of_a_band() {
        let (rows, columns) = (37, 5);
        let mut matrix: Vec<f32> = (0..rows * columns).map(|i| i as f32).collect();
        transpose(&mut matrix, [rows, columns]);
        for (i, value) in matrix.iter().enumerate() {
            let (column, row) = (i / rows, i % rows);
            assert_eq!(*value, (row * columns + column) as f32);
        }
    }
}
