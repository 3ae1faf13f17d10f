//! Grouped products on `Fusion`: each is one operation of the stream, run by the backend below.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;

use burn::tensor::ops::FloatTensor;
use burn::tensor::{DType, Shape, TensorMetadata};
use burn_fusion::stream::{Operation, OperationStreams};
use burn_fusion::{Fusion, FusionBackend, FusionTensor};
use burn_ir::{CustomOpIr, HandleContainer, OperationIr, TensorIr};

use crate::low_rank::{Expanded, Gradients2, Layout};
use crate::{Between, Compute, DropoutMask, GroupedBackend, RowGroups};

/// Tensors to tensors on the backend below.
type Run<B> = dyn Fn(Vec<FloatTensor<B>>) -> Vec<FloatTensor<B>> + Send + Sync;

struct Call<B: FusionBackend> {
    ir: CustomOpIr,
    run: Box<Run<B>>,
    backend: PhantomData<B>,
}

impl<B: FusionBackend> fmt::Debug for Call<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.ir.id)
    }
}

impl<B: FusionBackend> Operation<B::FusionRuntime> for Call<B> {
    fn execute(&self, handles: &mut HandleContainer<B::Handle>) {
        let inputs = self.ir.inputs.iter();
        let inputs = inputs.map(|ir| handles.get_float_tensor::<B>(ir)).collect();
        for (ir, output) in self.ir.outputs.iter().zip((self.run)(inputs)) {
            handles.register_float_tensor::<B>(&ir.id, output);
        }
    }
}

fn call<B: FusionBackend>(
    name: &'static str,
    inputs: Vec<FusionTensor<B::FusionRuntime>>,
    outputs: &[Shape],
    run: impl Fn(Vec<FloatTensor<B>>) -> Vec<FloatTensor<B>> + Send + Sync + 'static,
) -> Vec<FusionTensor<B::FusionRuntime>> {
    let (client, dtype) = (inputs[0].client.clone(), inputs[0].dtype);
    let streams = OperationStreams::with_inputs(&inputs);
    let outputs: Vec<_> = outputs
        .iter()
        .map(|shape| TensorIr::uninit(client.create_empty_handle(), shape.clone(), dtype))
        .collect();
    let inputs: Vec<_> = inputs.into_iter().map(FusionTensor::into_ir).collect();
    let ir = CustomOpIr::new(name, &inputs, &outputs);
    let operation = Call::<B> {
        ir: ir.clone(),
        run: Box::new(run),
        backend: PhantomData,
    };
    client.register(streams, OperationIr::Custom(ir), operation)
}

fn one<T>(mut outputs: Vec<T>) -> T {
    outputs.remove(0)
}

/// `N` tensors out of a list of as many.
fn all<T, const N: usize>(tensors: Vec<T>) -> [T; N] {
    tensors
        .try_into()
        .unwrap_or_else(|list: Vec<T>| panic!("{} tensors in place of {N}", list.len()))
}

impl<B: FusionBackend + GroupedBackend> GroupedBackend for Fusion<B> {
    fn grouped_matmul(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        groups: &RowGroups,
        transposed: bool,
    ) -> FloatTensor<Self> {
        let ([rows, _], [_, d_out, d_in]) = (x.shape().dims(), w.shape().dims());
        let columns = if transposed { d_in } else { d_out };
        let groups = groups.clone();
        let run = move |inputs| {
            let [x, w] = all(inputs);
            vec![B::grouped_matmul(x, w, &groups, transposed)]
        };
        let shape = Shape::from([rows, columns]);
        one(call::<B>("grouped_matmul", vec![x, w], &[shape], run))
    }

    fn grouped_outer(
        p: FloatTensor<Self>,
        q: FloatTensor<Self>,
        groups: &RowGroups,
    ) -> FloatTensor<Self> {
        let ([_, d_out], [_, d_in]) = (p.shape().dims(), q.shape().dims());
        let shape = Shape::from([groups.experts(), d_out, d_in]);
        let groups = groups.clone();
        let run = move |inputs| {
            let [p, q] = all(inputs);
            vec![B::grouped_outer(p, q, &groups)]
        };
        one(call::<B>("grouped_outer", vec![p, q], &[shape], run))
    }

    fn grouped_kernels(device: &Self::Device, dtype: DType, rank: usize) -> Result<(), String> {
        B::grouped_kernels(device, dtype, rank)
    }

    fn shrink(
        x: FloatTensor<Self>,
        a: FloatTensor<Self>,
        rows: &RowGroups,
        layout: Layout,
        compute: Compute,
    ) -> FloatTensor<Self> {
        let shape = Shape::from([x.shape()[0], a.shape()[1]]);
        let rows = rows.clone();
        let run = move |inputs| {
            let [x, a] = all(inputs);
            vec![B::shrink(x, a, &rows, layout, compute)]
        };
        one(call::<B>("shrink", vec![x, a], &[shape], run))
    }

    fn shrink_backward(
        dz: FloatTensor<Self>,
        x: Option<FloatTensor<Self>>,
        a: Option<FloatTensor<Self>>,
        rows: &RowGroups,
        compute: Compute,
    ) -> Gradients2<Self> {
        let (has_x, has_a) = (x.is_some(), a.is_some());
        let rank = dz.shape()[1];
        let da = x
            .as_ref()
            .map(|x| Shape::from([rows.experts(), rank, x.shape()[1]]));
        let dx = a
            .as_ref()
            .map(|a| Shape::from([dz.shape()[0], a.shape()[2]]));
        let shapes: Vec<_> = dx.into_iter().chain(da).collect();
        if shapes.is_empty() {
            return [None, None];
        }
        let inputs = std::iter::once(dz).chain(x).chain(a).collect();
        let rows = rows.clone();
        let run = move |inputs: Vec<_>| {
            let mut inputs = inputs.into_iter();
            let dz = inputs.next().expect("the gradient is an input");
            let x = has_x.then(|| inputs.next()).flatten();
            let a = has_a.then(|| inputs.next()).flatten();
            B::shrink_backward(dz, x, a, &rows, compute)
                .into_iter()
                .flatten()
                .collect()
        };
        let mut outputs = call::<B>("shrink_backward", inputs, &shapes, run).into_iter();
        [
            has_a.then(|| outputs.next()).flatten(),
            has_x.then(|| outputs.next()).flatten(),
        ]
    }

    fn dropout(x: FloatTensor<Self>, mask: &DropoutMask) -> FloatTensor<Self> {
        let (shape, mask) = (x.shape(), mask.clone());
        let run = move |inputs| {
            let [x] = all(inputs);
            vec![B::dropout(x, &mask)]
        };
        one(call::<B>("dropout", vec![x], &[shape], run))
    }

    fn expand(
        z: FloatTensor<Self>,
        b: FloatTensor<Self>,
        f: Between,
        rows: &RowGroups,
        compute: Compute,
    ) -> FloatTensor<Self> {
        let shape = Shape::from([z.shape()[0], b.shape()[1]]);
        let rows = rows.clone();
        let run = move |inputs| {
            let [z, b] = all(inputs);
            vec![B::expand(z, b, f, &rows, compute)]
        };
        one(call::<B>("expand", vec![z, b], &[shape], run))
    }

    fn expand_into(
        base: FloatTensor<Self>,
        columns: Range<usize>,
        z: FloatTensor<Self>,
        b: FloatTensor<Self>,
        f: Between,
        rows: &RowGroups,
        compute: Compute,
    ) -> FloatTensor<Self> {
        let shape = base.shape();
        let rows = rows.clone();
        let run = move |inputs| {
            let [base, z, b] = all(inputs);
            vec![B::expand_into(
                base,
                columns.clone(),
                z,
                b,
                f,
                &rows,
                compute,
            )]
        };
        one(call::<B>("expand_into", vec![base, z, b], &[shape], run))
    }

    fn expand_backward(dy: FloatTensor<Self>, saved: Expanded<Self>, db: bool) -> Gradients2<Self> {
        let Expanded {
            columns,
            z,
            b,
            between,
            rows,
            compute,
        } = saved;
        let has_b = b.is_some();
        let rank = z.shape()[1];
        let dz = has_b.then(|| z.shape());
        let dw = db.then(|| Shape::from([rows.experts(), columns.len(), rank]));
        let shapes: Vec<_> = dz.into_iter().chain(dw).collect();
        if shapes.is_empty() {
            return [None, None];
        }
        let inputs = [dy, z].into_iter().chain(b).collect();
        let run = move |inputs: Vec<_>| {
            let mut inputs = inputs.into_iter();
            let dy = inputs.next().expect("the gradient is an input");
            let saved = Expanded {
                columns: columns.clone(),
                z: inputs.next().expect("the value is an input"),
                b: inputs.next(),
                between,
                rows: rows.clone(),
                compute,
            };
            let gradients = B::expand_backward(dy, saved, db);
            gradients.into_iter().flatten().collect()
        };
        let mut outputs = call::<B>("expand_backward", inputs, &shapes, run).into_iter();
        [
            has_b.then(|| outputs.next()).flatten(),
            db.then(|| outputs.next()).flatten(),
        ]
    }
}
