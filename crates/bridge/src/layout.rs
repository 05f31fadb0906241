//! The memory layout of values that pass from one layer to the next, and of gradients.

use tch::Tensor;

use crate::{Error, Result, address, adopt, ffi::bridged};

/// Returns `tensor` in the layout that layers pass on: each element once, without gaps, from an
/// address that is a multiple of 64 bytes. A dense tensor keeps its strides, even if transposed or
/// channels-last. Any other tensor is copied to contiguous memory: an expanded or overlapping view,
/// one with gaps, or one that begins inside another tensor's memory. The result has no graph.
///
/// Why: kernels are chosen by strides and alignment. A value must therefore look the same whether
/// it moved between layers of a stage, threads, devices or processes.
///
/// # Errors
/// The tensor is not strided (sparse, for example); out of memory.
pub fn settled(tensor: Tensor) -> Result<Tensor> {
    // SAFETY: the tensor at this address is borrowed for the whole call.
    let copy = unsafe { bridged::settled(address(&tensor)) }?;
    Ok(adopt(copy).unwrap_or(tensor))
}

/// Joins `tensors` along `axis`. The gradient of each is contiguous, in the layout of the first
/// tensor. libtorch's own concatenation gives gradients with gaps in memory, for which its batch
/// norm has a slow backward.
///
/// # Errors
/// No tensors; shapes that do not fit; an axis that is not there.
pub fn concatenate(tensors: &[&Tensor], axis: i64) -> Result<Tensor> {
    let addresses: Vec<usize> = tensors.iter().map(|tensor| address(tensor)).collect();
    // SAFETY: the tensors at these addresses are borrowed for the whole call.
    let joined = unsafe { bridged::concatenate(&addresses, axis) }?;
    adopt(joined).ok_or_else(|| Error("concatenate gave no tensor".into()))
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;
    use crate::vjp::{Request, vjp};

    #[test]
    fn oracle_a_concatenation_has_libtorchs_bits_and_gradients_without_gaps() {
        let images = |channels| {
            let own = counted(&[2, channels, 4, 3]).permute([0, 2, 3, 1]).contiguous();
            own.permute([0, 3, 1, 2]).set_requires_grad(true)
        };
        let parts = [images(3), images(5), images(2)];
        let parts: Vec<&Tensor> = parts.iter().collect();
        let (own, plain) = (concatenate(&parts, 1).unwrap(), Tensor::cat(&parts, 1));
        assert_eq!((own.stride(), own.size()), (plain.stride(), plain.size()));
        let gradients = |y: &Tensor| {
            let dy = y.detach().cos();
            let request =
                Request { outputs: &[y], output_grads: &[&dy], inputs: &parts, parameters: &[] };
            vjp(&request, &mut []).unwrap()
        };
        for ((own, plain), part) in gradients(&own).iter().zip(gradients(&plain)).zip(&parts) {
            assert_eq!(*own, plain);
            assert_eq!(own.as_ref().unwrap().stride(), part.stride());
        }
        assert!(concatenate(&[], 1).is_err());
        assert!(concatenate(&parts, 4).is_err());
        assert!(concatenate(&parts, -1).is_err());
    }

    fn counted(shape: &[i64]) -> Tensor {
        Tensor::arange(shape.iter().product::<i64>(), (Kind::Float, Device::Cpu)).reshape(shape)
    }

    fn is_same_memory(a: &Tensor, b: &Tensor) -> bool {
        a.data_ptr() == b.data_ptr() && a.stride() == b.stride()
    }

    #[test]
    fn oracle_dense_tensors_stay_where_they_are() {
        let images = counted(&[2, 3, 4, 8]);
        let last = images.permute([0, 2, 3, 1]).contiguous().permute([0, 3, 1, 2]);
        // The second row begins at byte 128.
        let aligned = counted(&[4, 32]).narrow(0, 1, 2);
        for tensor in [images.shallow_clone(), images.transpose(1, 3), last, aligned] {
            let found = settled(tensor.shallow_clone()).unwrap();
            assert!(is_same_memory(&found, &tensor), "{:?}", tensor.stride());
        }
        for shape in [&[0, 3][..], &[3, 0, 2], &[], &[1], &[1, 1, 1]] {
            let tensor = counted(shape);
            assert_eq!(settled(tensor.shallow_clone()).unwrap().stride(), tensor.stride());
        }
    }

    #[test]
    fn oracle_every_other_view_is_copied_and_contiguous() {
        let whole = counted(&[4, 6, 8]);
        let views = [
            ("overlapping", whole.unfold(1, 3, 1)),
            ("expanded", whole.narrow(1, 0, 1).expand([4, 5, 8], false)),
            ("gaps", whole.narrow(2, 1, 3)),
            ("every second", whole.slice(1, 0, 6, 2)),
            ("a diagonal", whole.diagonal(0, 0, 1)),
            ("boolean", whole.gt(7.0).narrow(2, 3, 2)),
        ];
        for (what, view) in views {
            let found = settled(view.shallow_clone()).unwrap();
            assert!(found.is_contiguous() && found.data_ptr() != view.data_ptr(), "{what}");
            assert!(found.equal(&view), "{what}");
        }
    }

    #[test]
    fn oracle_a_dense_view_at_an_odd_address_moves_and_keeps_its_strides() {
        let view = counted(&[5, 3]).narrow(0, 1, 4); // 12 bytes in
        let transposed = view.transpose(0, 1);
        for view in [view, transposed] {
            let found = settled(view.shallow_clone()).unwrap();
            assert_eq!((found.stride(), found.data_ptr() as usize % 64), (view.stride(), 0));
            assert!(found.equal(&view));
        }
    }

    /// The memory of a lazily negated view holds the original numbers: sent as bytes, they lost
    /// their sign.
    #[test]
    fn regression_a_lazily_negated_tensor_is_negated() {
        let complex = Tensor::complex(&counted(&[8]), &counted(&[8]));
        let negative = complex.conj().imag();
        let found = settled(negative.shallow_clone()).unwrap();
        assert_eq!(Vec::<f32>::try_from(&found).unwrap()[3], -3.0);
        assert!(!found.is_neg());
    }

    #[test]
    fn fault_a_sparse_tensor_is_an_error() {
        let sparse = counted(&[3, 3]).to_sparse_sparse_dim(1);
        let error = settled(sparse).unwrap_err().to_string();
        assert!(error.contains("to_dense"), "{error}");
    }
}
