//! The last part of a matrix product.

/// The operation on a product before it is stored. `V` is a bias: one value for each row of the matrix.
#[derive(Clone, Copy, Debug)]
pub enum Epilogue<V> {
    /// `out = product`
    Store,
    /// `out = product + bias`
    Bias(V),
    /// `out = product + out`, for residual connections.
    Add,
    /// `out = (product + out) + bias`
    AddBias(V),
}

impl<V> Epilogue<V> {
    /// The bias, if there is one.
    pub fn bias(&self) -> Option<&V> {
        match self {
            Self::Store | Self::Add => None,
            Self::Bias(bias) | Self::AddBias(bias) => Some(bias),
        }
    }

    /// The same operation with another representation of the bias.
    pub fn map<W>(self, f: impl FnOnce(V) -> W) -> Epilogue<W> {
        match self {
            Self::Store => Epilogue::Store,
            Self::Bias(bias) => Epilogue::Bias(f(bias)),
            Self::Add => Epilogue::Add,
            Self::AddBias(bias) => Epilogue::AddBias(f(bias)),
        }
    }
}
