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

/// Outputs of the type of the first input.
fn call<B: FusionBackend>(
    name: &'static str,
    inputs: Vec<FusionTensor<B::FusionRuntime>>,
    outputs: &[Shape],
    run: impl Fn(Vec<FloatTensor<B>>) -> Vec<FloatTensor<B>> + Send + Sync + 'static,
) -> Vec<FusionTensor<B::FusionRuntime>> {
    let dtype = inputs[0].dtype;
    let outputs: Vec<_> = outputs.iter().map(|shape| (shape.clone(), dtype)).collect();
    call_for::<B>(name, inputs, &outputs, run)
}

fn call_for<B: FusionBackend>(
    name: &'static str,
    inputs: Vec<FusionTensor<B::FusionRuntime>>,
    outputs: &[(Shape, DType)],
    run: impl Fn(Vec<FloatTensor<B>>) -> Vec<FloatTensor<B>> + Send + Sync + 'static,
) -> Vec<FusionTensor<B::FusionRuntime>> {
    let client = inputs[0].client.clone();
    let streams = OperationStreams::with_inputs(&inputs);
    let outputs: Vec<_> = outputs
        .iter()
        .map(|(shape, dtype)| TensorIr::uninit(client.create_empty_handle(), shape.clone(), *dtype))
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

    fn scale_columns(
        y: FloatTensor<Self>,
        factors: FloatTensor<Self>,
        rows: &RowGroups,
    ) -> FloatTensor<Self> {
        let (shape, rows) = (y.shape(), rows.clone());
        let run = move |inputs| {
            let [y, factors] = all(inputs);
            vec![B::scale_columns(y, factors, &rows)]
        };
        one(call::<B>("scale_columns", vec![y, factors], &[shape], run))
    }

    fn scale_columns_backward(
        dy: FloatTensor<Self>,
        y: Option<FloatTensor<Self>>,
        factors: FloatTensor<Self>,
        of_y: bool,
        rows: &RowGroups,
    ) -> Gradients2<Self> {
        let of_factors = y.is_some();
        let of = |x: &FloatTensor<Self>| (x.shape(), x.dtype());
        let d_y = of_y.then(|| of(&dy));
        let d_factors = of_factors.then(|| of(&factors));
        let outputs: Vec<_> = d_y.into_iter().chain(d_factors).collect();
        if outputs.is_empty() {
            return [None, None];
        }
        let inputs = [dy, factors].into_iter().chain(y).collect();
        let rows = rows.clone();
        let run = move |inputs: Vec<_>| {
            let mut inputs = inputs.into_iter();
            let dy = inputs.next().expect("the gradient is an input");
            let factors = inputs.next().expect("the factors are an input");
            let y = inputs.next();
            let gradients = B::scale_columns_backward(dy, y, factors, of_y, &rows);
            gradients.into_iter().flatten().collect()
        };
        let mut outputs =
            call_for::<B>("scale_columns_backward", inputs, &outputs, run).into_iter();
        [
            of_y.then(|| outputs.next()).flatten(),
            of_factors.then(|| outputs.next()).flatten(),
        ]
    }

    fn row_terms(
        w: FloatTensor<Self>,
        a: FloatTensor<Self>,
        rows: &[RowGroups; 2],
        wide: DType,
        compute: Compute,
    ) -> [FloatTensor<Self>; 3] {
        let ([experts, n, _], [_, rank, _]) = (w.shape().dims(), a.shape().dims());
        let of_products = match w.dtype() == a.dtype() {
            true => a.dtype(),
            false => wide,
        };
        let outputs = [
            (Shape::from([experts, n, 1]), wide),
            (Shape::from([experts, n, rank]), of_products),
            (Shape::from([experts, rank, rank]), of_products),
        ];
        let rows = rows.clone();
        let run = move |inputs| {
            let [w, a] = all(inputs);
            B::row_terms(w, a, &rows, wide, compute).into()
        };
        all(call_for::<B>("row_terms", vec![w, a], &outputs, run))
    }

    fn row_norms(
        terms: [FloatTensor<Self>; 3],
        b: FloatTensor<Self>,
        scale: f64,
        of_zero: f64,
    ) -> FloatTensor<Self> {
        let shape = terms[0].shape();
        let run = move |inputs| {
            let [squares, products, gram, b] = all(inputs);
            vec![B::row_norms([squares, products, gram], b, scale, of_zero)]
        };
        let inputs = terms.into_iter().chain([b]).collect();
        one(call::<B>("row_norms", inputs, &[shape], run))
    }
}
