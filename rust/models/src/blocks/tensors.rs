//! The declaration of tensors.

/// Tensors of a checkpoint that are concatenated by rows, as one weight.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fused {
    /// Hugging Face's names.
    pub(crate) names: Vec<String>,
    /// Rows of each tensor; the values of each vector.
    pub(crate) rows: Vec<usize>,
    /// `None` for vectors.
    pub(crate) columns: Option<usize>,
    /// The number of the matrix among those that adapters can update; `None` for others.
    pub(crate) number: Option<u32>,
}

impl Fused {
    pub(crate) fn len(&self) -> usize {
        self.rows.iter().sum()
    }

    pub(crate) fn num_parameters(&self) -> u64 {
        self.len() as u64 * self.columns.unwrap_or(1) as u64
    }
}

/// A matrix that adapters can update, and its bias.
pub(crate) struct Linear<M, V> {
    pub(crate) weight: M,
    pub(crate) bias: Option<V>,
    /// The number of the matrix among those that adapters can update.
    pub(crate) number: u32,
}

/// The receiver of a declaration.
pub(crate) trait Tensors {
    type Matrix;
    type Vector;
    type Error;

    fn matrix(&mut self, fused: Fused) -> Result<Self::Matrix, Self::Error>;

    fn vector(&mut self, fused: Fused) -> Result<Self::Vector, Self::Error>;
}

/// The declaration of a model: the tensors of a layer have the names of its modules.
pub(crate) struct Declaration<'a, T> {
    tensors: &'a mut T,
    layer: usize,
    num_linear: u32,
}

impl<'a, T: Tensors> Declaration<'a, T> {
    pub(crate) fn new(tensors: &'a mut T) -> Self {
        Self { tensors, layer: 0, num_linear: 0 }
    }

    /// The layer of the next modules.
    pub(crate) fn set_layer(&mut self, layer: usize) {
        self.layer = layer;
    }

    /// The linear modules `parts` of the layer as one matrix, with `rows[i]` output features each.
    pub(super) fn linear(
        &mut self,
        parts: &[&str],
        rows: &[usize],
        columns: usize,
        has_bias: bool,
    ) -> Result<Linear<T::Matrix, T::Vector>, T::Error> {
        let number = self.num_linear;
        self.num_linear += 1;
        let fused = |kind, columns, number| Fused {
            names: parts.iter().map(|part| format!("model.layers.{}.{part}.{kind}", self.layer)).collect(),
            rows: rows.to_vec(),
            columns,
            number,
        };
        let (weight, bias) = (fused("weight", Some(columns), Some(number)), fused("bias", None, None));
        let weight = self.tensors.matrix(weight)?;
        let bias = if has_bias { Some(self.tensors.vector(bias)?) } else { None };
        Ok(Linear { weight, bias, number })
    }

    /// The weight of a norm of the layer.
    pub(super) fn norm(&mut self, part: &str, len: usize) -> Result<T::Vector, T::Error> {
        self.vector(&format!("model.layers.{}.{part}.weight", self.layer), len)
    }

    /// A vector outside the layers.
    pub(crate) fn vector(&mut self, name: &str, len: usize) -> Result<T::Vector, T::Error> {
        let fused = Fused { names: vec![name.to_owned()], rows: vec![len], columns: None, number: None };
        self.tensors.vector(fused)
    }

    /// A matrix outside the layers.
    pub(crate) fn table(&mut self, name: &str, rows: usize, columns: usize) -> Result<T::Matrix, T::Error> {
        let names = vec![name.to_owned()];
        self.tensors.matrix(Fused { names, rows: vec![rows], columns: Some(columns), number: None })
    }
}

/// The name of the module of a weight matrix.
pub(crate) fn module_name(tensor: &str) -> &str {
    tensor.strip_suffix(".weight").unwrap_or(tensor)
}

/// The layer of a module, as it is written, and the name of the module in the layer.
pub(crate) fn layer_of(module: &str) -> Option<(&str, &str)> {
    module.strip_prefix("model.layers.")?.split_once('.')
}
