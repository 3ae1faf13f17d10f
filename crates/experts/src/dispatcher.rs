//! Brings tokens to their experts and back: expert parallel all-to-all, then all-gather over the
//! expert's tensor parallel ranks; reduce-scatter and all-to-all on the way back.

use burn::tensor::Tensor;
use moe_lora_adapters::{Slot, TokenIds};
use moe_lora_kernels::{GroupError, RowGroups};
use moe_lora_parallel::region::{pad, unpad};
use moe_lora_parallel::{
    Ep, ExpertTp, Fanout, Group, Mesh, ParallelBackend, Partial, Tokens, all_to_all, range_of,
};

use crate::order::{inverse, select, sorted_by};
use crate::tokens::{exchange, travel};

/// The way of one batch of tokens, known on the host before anything is sent.
///
/// Every rank brings its own tokens and may bring any number of them, none included.
#[derive(Clone, Debug)]
pub struct Dispatch<B: ParallelBackend> {
    ep: Group<B, Ep>,
    etp: Group<B, ExpertTp>,
    top_k: usize,
    /// Local assignments `(token, choice)` in the order they are sent: sorted by global expert.
    order: Vec<usize>,
    /// Rows that each expert parallel rank sends to each other one.
    sent: Vec<Vec<usize>>,
    /// Rows from each expert parallel rank.
    recv: Vec<usize>,
    /// Rows that each expert tensor parallel rank received.
    gathered: Vec<usize>,
    /// Gathered rows in the order of local experts.
    sorted: Vec<usize>,
    rows: RowGroups,
}

impl<B: ParallelBackend> Dispatch<B> {
    /// Plans the way of `experts.len() / top_k` tokens; two small exchanges of host integers.
    ///
    /// `experts` holds the global expert of each `(token, choice)`, `local` the number of
    /// experts a rank holds.
    ///
    /// # Errors
    ///
    /// When the ranks' counts do not add up.
    ///
    /// # Panics
    ///
    /// When an expert is outside the model, when `top_k` does not divide the assignments, or when
    /// a collective fails.
    pub fn plan(
        experts: &[usize],
        top_k: usize,
        local: usize,
        mesh: &Mesh<B>,
    ) -> Result<Self, GroupError> {
        let (ep, etp) = (mesh.ep().clone(), mesh.expert_tp().clone());
        let num_experts = local * ep.size();
        assert!(
            experts.len().is_multiple_of(top_k),
            "{} assignments are not a whole number of tokens of top_k={top_k}",
            experts.len()
        );
        let mut counts = vec![0; num_experts];
        for expert in experts {
            assert!(
                *expert < num_experts,
                "expert {expert} is outside num_experts={num_experts}"
            );
            counts[*expert] += 1;
        }
        let order = sorted_by(experts);

        let from_ep = ep.exchange_sizes(&counts);
        let mine = ep.rank() * local..(ep.rank() + 1) * local;
        let by_rank = |counts: &[usize]| -> Vec<usize> {
            counts.chunks(local).map(|c| c.iter().sum()).collect()
        };
        let sent: Vec<Vec<usize>> = from_ep.iter().map(|counts| by_rank(counts)).collect();
        let received: Vec<usize> = from_ep
            .iter()
            .flat_map(|counts| &counts[mine.clone()])
            .copied()
            .collect();
        let recv = by_rank(&received);

        let from_etp = etp.exchange_sizes(&received);
        let gathered: Vec<usize> = from_etp.iter().map(|counts| counts.iter().sum()).collect();
        // Gathered rows lie by (expert tensor parallel rank, expert parallel source, expert).
        let expert_of_row: Vec<usize> = from_etp
            .iter()
            .flatten()
            .enumerate()
            .flat_map(|(place, count)| std::iter::repeat_n(place % local, *count))
            .collect();
        let mut rows = vec![0; local];
        for expert in &expert_of_row {
            rows[*expert] += 1;
        }
        // Experts that no token chose get a row of zeros: no backend sees a product without rows.
        let received = expert_of_row.len();
        if received == 0 {
            rows[0] = 1;
        }
        Ok(Self {
            rows: RowGroups::new(&rows, received.max(1))?,
            ep,
            etp,
            top_k,
            order,
            sent,
            recv,
            gathered,
            sorted: sorted_by(&expert_of_row),
        })
    }

    /// The same way of these tokens: [`rows`](Self::rows) then have their ids, and lie by slot within
    /// each expert where the tokens have slots. Two exchanges of host integers, as many as there are
    /// assignments, and two more with slots.
    ///
    /// # Panics
    ///
    /// When there is not one id for each token, or when a collective fails.
    pub fn with_tokens(mut self, tokens: &TokenIds) -> Self {
        let ids = tokens.ids();
        assert_eq!(
            ids.len() * self.top_k,
            self.order.len(),
            "number of token ids times top_k"
        );
        let order: Vec<usize> = self.order.iter().map(|at| at / self.top_k).collect();
        let sizes: Vec<usize> = self.sent.iter().map(|to| to.iter().sum()).collect();
        let gathered = travel(tokens.pick(&order), |permuted| {
            let from_ep = exchange(&self.ep, permuted, &sizes).into_iter();
            let mine = from_ep
                .zip(&self.sent)
                .flat_map(|(ids, to)| ids[range_of(to, self.ep.rank())].to_vec());
            exchange(&self.etp, &mine.collect::<Vec<_>>(), &self.gathered).concat()
        });
        if self.sorted.is_empty() {
            // The row of zeros.
            let row = TokenIds::new(tokens.step(), [0]);
            let row = match tokens.slots() {
                None => row,
                Some(_) => row.with_slots([Slot::BASE]),
            };
            self.rows = self.rows.with_tokens(row);
            return self;
        }
        if let Some(slots) = gathered.slots() {
            for expert in 0..self.rows.experts() {
                self.sorted[self.rows.range(expert)].sort_by_key(|row| slots[*row]);
            }
        }
        self.rows = self.rows.with_tokens(gathered.pick(&self.sorted));
        self
    }

    /// Rows by local expert after [`tokens`](Self::tokens); one, of zeros, when none came.
    pub fn rows(&self) -> &RowGroups {
        &self.rows
    }

    /// Copies each token once for each of its experts and brings the copies there.
    ///
    /// # Shapes
    ///
    /// `[T, n]` of this rank to `[rows, n]` sorted by local expert.
    pub fn tokens(&self, x: Tensor<B, 2>) -> Fanout<B, ExpertTp> {
        let tokens: Vec<usize> = self.order.iter().map(|at| at / self.top_k).collect();
        self.send(select(x, &tokens))
    }

    /// Brings one row for each `(token, choice)` to its expert, as routing weights go.
    ///
    /// # Shapes
    ///
    /// `[T * K, n]` of this rank to `[rows, n]` sorted by local expert.
    pub fn assignments(&self, x: Tensor<B, 2>) -> Fanout<B, ExpertTp> {
        self.send(select(x, &self.order))
    }

    /// Rows to each expert parallel rank.
    fn to_ep(&self) -> &[usize] {
        &self.sent[self.ep.rank()]
    }

    fn send(&self, permuted: Tensor<B, 2>) -> Fanout<B, ExpertTp> {
        let received = all_to_all(permuted, &self.ep, self.to_ep(), &self.recv);
        self.etp
            .shard_tokens(received, &self.gathered)
            .gather_fanout()
            .map(|x| match self.sorted.is_empty() {
                true => pad(x, &self.etp),
                false => select(x, &self.sorted),
            })
    }

    /// Sums the experts' terms over their tensor parallel ranks and brings each row back to where
    /// its token came from.
    ///
    /// # Shapes
    ///
    /// `[rows, n]` to `[T * K, n]` in the order of `(token, choice)`.
    pub fn combine(&self, y: Partial<B, ExpertTp>) -> Tensor<B, 2> {
        let summed = y
            .map_linear(|y| match self.sorted.is_empty() {
                true => unpad(y, &self.etp),
                false => select(y, &inverse(&self.sorted)),
            })
            .reduce_scatter::<Tokens>(&self.gathered);
        let returned = all_to_all(summed.into_tensor(), &self.ep, &self.recv, self.to_ep());
        select(returned, &inverse(&self.order))
    }
}
