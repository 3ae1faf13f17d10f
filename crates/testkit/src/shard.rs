//! Cutting full matrices into the parts of ranks, and back. Written without the library's own
//! layouts, so that an error there shows.

use moe_lora_parallel::Topology;

use crate::Matrix;

/// The axis along which the ranks of a group hold slices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Axis {
    /// `d_out` of a weight, tokens of an activation; each of so many equal fragments by itself.
    Rows(usize),
    /// `d_in` of a weight, features of an activation.
    Columns,
    /// Tokens, as many on each rank as it likes.
    Tokens,
    /// Every rank holds everything.
    Whole,
}

/// The full row numbers that `rank` of `ranks` holds.
fn rows_of(total: usize, fragments: usize, rank: usize, ranks: usize) -> Vec<usize> {
    let slice = total / fragments / ranks;
    assert_eq!(slice * fragments * ranks, total);
    (0..fragments)
        .flat_map(|fragment| {
            let start = (fragment * ranks + rank) * slice;
            start..start + slice
        })
        .collect()
}

/// The part of `full` that `rank` of `ranks` holds.
///
/// # Panics
///
/// For tokens, whose number on each rank is not given.
pub fn shard(full: &Matrix, axis: Axis, rank: usize, ranks: usize) -> Matrix {
    match axis {
        Axis::Tokens => panic!("pick the rank's rows"),
        Axis::Whole => full.clone(),
        Axis::Rows(fragments) => full.pick_rows(rows_of(full.rows, fragments, rank, ranks)),
        Axis::Columns => full
            .transposed()
            .pick_rows(rows_of(full.columns, 1, rank, ranks))
            .transposed(),
    }
}

/// The full matrix of the ranks' parts.
///
/// # Panics
///
/// When ranks that should hold the same differ in a bit.
pub fn unshard(parts: &[Matrix], axis: Axis) -> Matrix {
    let ranks = parts.len();
    match axis {
        Axis::Whole => {
            for part in parts {
                assert_eq!(part, &parts[0], "replicas differ");
            }
            parts[0].clone()
        }
        Axis::Tokens => Matrix::stack(parts),
        Axis::Rows(fragments) => {
            let total = parts[0].rows * ranks;
            let mut full = Matrix::zeros(total, parts[0].columns);
            for (rank, part) in parts.iter().enumerate() {
                for (local, row) in rows_of(total, fragments, rank, ranks)
                    .into_iter()
                    .enumerate()
                {
                    full.add_to_rows(row, &part.pick_rows([local]));
                }
            }
            full
        }
        Axis::Columns => {
            let parts: Vec<Matrix> = parts.iter().map(Matrix::transposed).collect();
            unshard(&parts, Axis::Rows(1)).transposed()
        }
    }
}

/// The full matrix of each expert. `parts[rank]` holds those of the local experts of that rank of
/// the world, or one alone where the experts share it.
///
/// # Panics
///
/// When replicas differ in a bit.
pub fn unshard_experts(parts: &[Vec<Matrix>], topology: &Topology, axis: Axis) -> Vec<Matrix> {
    let (ep, etp) = (topology.ep(), topology.etp());
    let replica = |expert_dp: usize| -> Vec<Vec<Matrix>> {
        let of_rank = |ep_rank: usize| {
            let first = (expert_dp * ep + ep_rank) * etp;
            let group = &parts[first..first + etp];
            (0..group[0].len())
                .map(|expert| {
                    let slices: Vec<Matrix> = group.iter().map(|p| p[expert].clone()).collect();
                    unshard(&slices, axis)
                })
                .collect()
        };
        (0..ep).map(of_rank).collect()
    };
    let first = replica(0);
    for expert_dp in 1..topology.expert_dp() {
        assert_eq!(replica(expert_dp), first, "replicas of the experts differ");
    }
    first.concat()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::noise;

    #[test]
    fn parts_make_the_whole_again() {
        let full = noise(1, 12, 8);
        for axis in [Axis::Rows(1), Axis::Rows(3), Axis::Columns, Axis::Whole] {
            for ranks in [1, 2, 4] {
                let parts: Vec<_> = (0..ranks).map(|r| shard(&full, axis, r, ranks)).collect();
                assert_eq!(unshard(&parts, axis), full, "{axis:?} {ranks}");
            }
        }
    }

    #[test]
    fn a_rank_holds_a_slice_of_each_fragment() {
        let full = Matrix::build(8, 1, |i, _| i as f64);
        assert_eq!(shard(&full, Axis::Rows(2), 1, 2).values, [2., 3., 6., 7.]);
        assert_eq!(shard(&full, Axis::Rows(1), 1, 2).values, [4., 5., 6., 7.]);
    }
}
