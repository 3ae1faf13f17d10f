//! Ranks that are processes of their own.

use std::sync::Mutex;

use moe_lora_parallel::{Group, GroupKind, Mesh, ParallelBackend, Topology, Transport};
use serde::{Serialize, de::DeserializeOwned};

use crate::Ranks;

/// This process's rank of a world of processes: [`Ranks::run`] runs the body on this rank alone, and
/// every process returns the results of all ranks.
///
/// Every process runs the same cases in the same order. Meshes are kept for the next case at the same
/// topology: connecting takes longer than most cases.
pub struct Member<B: ParallelBackend, T> {
    transport: T,
    device: B::Device,
    meshes: Mutex<Vec<Mesh<B>>>,
}

impl<B: ParallelBackend, T: Transport<B::Base>> Member<B, T> {
    /// The rank of this transport, on this device.
    pub fn new(transport: T, device: B::Device) -> Self {
        Self {
            transport,
            device,
            meshes: Mutex::default(),
        }
    }

    fn mesh(&self, topology: Topology) -> Mesh<B> {
        let mut meshes = self.meshes.lock().expect("no case has failed in here");
        if let Some(mesh) = meshes.iter().find(|mesh| *mesh.topology() == topology) {
            return mesh.clone();
        }
        let mesh = Mesh::new(topology, &self.transport).expect("world and topology have one size");
        meshes.push(mesh.clone());
        mesh
    }
}

impl<B: ParallelBackend, T: Transport<B::Base>> Ranks<B> for Member<B, T> {
    fn run<R: Send + Serialize + DeserializeOwned>(
        &self,
        topology: Topology,
        body: impl Fn(&Mesh<B>, &B::Device) -> R + Sync,
    ) -> Vec<R> {
        let mesh = self.mesh(topology);
        let own = body(&mesh, &self.device);
        // Ranks are expert tensor, then expert, then replica coordinates: three passes reach all.
        let known = over(mesh.expert_tp(), vec![own]);
        let known = over(mesh.ep(), known);
        over(mesh.expert_dp(), known)
    }
}

/// The values of every rank of a group, in group order, to the bit.
fn over<B: ParallelBackend, G: GroupKind, T: Serialize + DeserializeOwned>(
    group: &Group<B, G>,
    own: Vec<T>,
) -> Vec<T> {
    const WORD: usize = size_of::<usize>();
    // JSON has no NaN, which is what a wrong kernel gives.
    let mut bytes = rmp_serde::to_vec(&own).expect("results can be serialised");
    let lengths = group.exchange_sizes(&[bytes.len()]).concat();
    let longest = lengths.iter().max().expect("a group has a rank");
    bytes.resize(longest.next_multiple_of(WORD), 0);
    let words = bytes.chunks_exact(WORD);
    let words = words.map(|word| usize::from_le_bytes(word.try_into().expect("it has this size")));
    let of_ranks = group.exchange_sizes(&words.collect::<Vec<_>>());
    let values = of_ranks.iter().zip(lengths).flat_map(|(words, length)| {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let values: Vec<T> =
            rmp_serde::from_slice(&bytes[..length]).expect("results can be read back");
        values
    });
    values.collect()
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::{Duration, Instant};

    use burn::backend::Flex;
    use moe_lora_parallel::{MockWorld, TopologyConfig};

    use super::*;
    use crate::{Matrix, Mocked, mock};

    const WORLD: usize = 8;

    /// A world in which no group is all of it.
    fn topology() -> Topology {
        let config = TopologyConfig::new(WORLD).with_tp(2);
        config.with_ep(2).with_etp(2).init().unwrap()
    }

    /// Of another size on each rank, and with values that decimals or a sum would not give back.
    fn result(rank: usize) -> Matrix {
        const VALUES: [f64; 6] = [f64::NAN, -0.0, f64::NEG_INFINITY, 0.1, 5e-324, 1.0 / 3.0];
        Matrix::build(rank, VALUES.len(), |i, j| VALUES[j] * (i + 1) as f64)
    }

    fn bits(matrices: &[Matrix]) -> Vec<(usize, usize, Vec<u64>)> {
        let bits = |matrix: &Matrix| matrix.values.iter().map(|value| value.to_bits()).collect();
        let all = matrices.iter();
        all.map(|matrix| (matrix.rows, matrix.columns, bits(matrix)))
            .collect()
    }

    #[test]
    fn every_process_has_the_results_of_all_ranks_in_their_order_and_to_the_bit() {
        let body = |mesh: &Mesh<Flex>, _: &_| result(mesh.rank());
        let expected = bits(&Mocked.run(topology(), body));
        let cases = |rank| {
            let member = Member::<Flex, _>::new(rank, Default::default());
            // The second time over the mesh of the first.
            [0, 1].map(|_| bits(&member.run(topology(), body)))
        };
        for found in mock(topology()).run(cases).unwrap().concat() {
            assert_eq!(found, expected);
        }
    }

    #[test]
    fn a_rank_that_does_not_come_is_named_within_the_timeout() {
        let timeout = Duration::from_millis(300);
        let world = MockWorld::new(2).with_timeout(timeout);
        let topology = TopologyConfig::new(2).with_ep(2).init().unwrap();
        let start = Instant::now();
        let error = world.run(|rank| {
            let member = Member::<Flex, _>::new(rank, Default::default());
            member.run(topology, |mesh, _| {
                if mesh.rank() == 1 {
                    thread::sleep(5 * timeout);
                }
            });
        });
        let error = error.unwrap_err().to_string();
        let expected =
            "rank 0 failed: exchange_sizes on group ep at rank 0: no call from ranks [1]";
        assert!(error.starts_with(expected), "{error}");
        assert!(start.elapsed() < 20 * timeout);
    }

    #[test]
    fn a_rank_that_fails_ends_the_others() {
        let topology = TopologyConfig::new(2).with_etp(2).init().unwrap();
        let error = mock(topology).run(|rank| {
            let member = Member::<Flex, _>::new(rank, Default::default());
            member.run(topology, |mesh, _| assert_eq!(mesh.rank(), 0, "on purpose"));
        });
        let error = error.unwrap_err().to_string();
        assert!(
            error.starts_with("rank 1 panicked: ") && error.contains("on purpose"),
            "{error}"
        );
    }
}
