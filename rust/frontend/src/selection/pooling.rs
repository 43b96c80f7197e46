//! The embedding of a text from its hidden states.

use crate::output::FloatArray;

/// The reason why hidden states cannot be pooled.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PoolingError {
    #[error("pooling={0:?} is not allowed: it must be \"last\" or \"mean\"")]
    Mode(String),
    #[error("the tensor has shape {0:?}; hidden states have two dimensions and at least one row")]
    Shape(Vec<usize>),
    #[error("dimensions={given} is not allowed: it must be from 1 to {size}")]
    Dimensions { given: usize, size: usize },
}

/// The last row of `states`, of shape `(positions, size)`, or the mean of its rows: the first `dimensions` values. With
/// `normalize` these are divided by their Euclidean length. Computed in float64.
pub fn pool(
    states: &FloatArray,
    pooling: &str,
    normalize: bool,
    dimensions: Option<usize>,
) -> Result<FloatArray, PoolingError> {
    let (num_rows, size) = match *states.shape() {
        [num_rows, size] if num_rows > 0 => (num_rows, size),
        _ => return Err(PoolingError::Shape(states.shape().to_vec())),
    };
    let rows = match pooling {
        "last" => num_rows - 1..num_rows,
        "mean" => 0..num_rows,
        other => return Err(PoolingError::Mode(other.to_owned())),
    };
    let width = dimensions.unwrap_or(size);
    if !(1..=size).contains(&width) {
        return Err(PoolingError::Dimensions { given: width, size });
    }
    let count = rows.len() as f64;
    let mut sums = vec![0.0_f64; width];
    let mut row = vec![0.0; width];
    for index in rows {
        states.copy_from(index * size, &mut row);
        for (sum, value) in sums.iter_mut().zip(&row) {
            *sum += f64::from(*value);
        }
    }
    let mut divisor = count;
    if normalize {
        let length = sums.iter().map(|sum| sum * sum).sum::<f64>().sqrt();
        divisor = if length == 0.0 { 1.0 } else { length };
    }
    Ok(FloatArray::new(vec![width], sums.into_iter().map(|sum| (sum / divisor) as f32).collect()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    fn pooled(pooling: &str, normalize: bool, dimensions: Option<usize>) -> Vec<f32> {
        let states = FloatArray::new(vec![2, 3], vec![1.0, 2.0, 3.0, 5.0, 2.0, -3.0]);
        pool(&states, pooling, normalize, dimensions).unwrap().values()
    }

    #[test]
    fn mean_and_last_row_of_all_or_the_first_dimensions() {
        assert_eq!(pooled("mean", false, None), [3.0, 2.0, 0.0]);
        assert_eq!(pooled("last", false, None), [5.0, 2.0, -3.0]);
        assert_eq!(pooled("last", false, Some(2)), [5.0, 2.0]);
    }

    #[test]
    fn normalised_embedding_has_length_one_after_it_is_cut() {
        let squares = |values: &[f32]| values.iter().map(|value| value * value).sum::<f32>();
        for dimensions in [None, Some(2)] {
            let values = pooled("mean", true, dimensions);
            assert!((squares(&values) - 1.0).abs() < 1e-6);
            assert_eq!(values[0] * 2.0, values[1] * 3.0);
        }
        let zero = FloatArray::new(vec![1, 2], vec![0.0; 2]);
        assert_eq!(pool(&zero, "mean", true, None).unwrap().values(), [0.0; 2]);
    }

    #[test]
    fn other_modes_shapes_and_dimensions_are_errors() {
        let states = FloatArray::new(vec![2, 2], vec![0.0; 4]);
        let error = |pooling, dimensions| pool(&states, pooling, false, dimensions).unwrap_err();
        assert_eq!(error("cls", None), PoolingError::Mode("cls".to_owned()));
        assert_eq!(error("last", Some(0)), PoolingError::Dimensions { given: 0, size: 2 });
        assert_eq!(error("last", Some(3)), PoolingError::Dimensions { given: 3, size: 2 });
        for shape in [vec![4], vec![0, 4], vec![1, 2, 2]] {
            let count = shape.iter().product();
            let other = FloatArray::new(shape.clone(), vec![0.0; count]);
            assert_eq!(pool(&other, "mean", false, None), Err(PoolingError::Shape(shape)));
        }
    }
}
