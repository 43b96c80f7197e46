//! Rotary position embedding (Su et al. 2021, RoFormer, section 3.4.2) and its five scalings.
//!
//! The angles of position p are p times the inverse frequencies, computed in float32 exactly as `transformers` does, so
//! that far positions agree. `Dynamic` is the only scaling whose frequencies depend on a length: the prompt's for every
//! position of the prompt, the position's own plus one after it. This equals one prefill of the whole prompt and
//! decoding token by token, and depends on the request alone, never on the prompt chunks.

use crate::error::ModelError;
use crate::fields::{Fields, MAX_POSITIONS};

/// The base of the frequencies of a configuration without `rope_theta`.
const DEFAULT_THETA: f64 = 10_000.0;

/// Inverse frequencies, and the factor on cosines and sines.
pub(crate) type Frequencies = (Vec<f32>, f32);

/// Frequencies of one model.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    theta: f64,
    head_dim: usize,
    max_position_embeddings: usize,
    scaling: RopeScaling,
    /// One divisor per frequency, if the file has them (GGUF).
    divisors: Option<Vec<f32>>,
}

/// The scaling of the frequencies beyond the trained length.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// No scaling.
    Default,
    /// Every frequency divided by the factor.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// NTK-aware scaling of the base that grows with the sequence.
    Dynamic {
        /// Multiple of the trained length.
        factor: f64,
    },
    /// YaRN (Peng et al. 2023, section 3.2-3.4): low frequencies interpolated, high ones kept, a ramp between.
    Yarn {
        /// Multiple of the trained length.
        factor: f64,
        /// The trained length.
        original: usize,
        /// Rotations above which a frequency is kept.
        beta_fast: f64,
        /// Rotations below which a frequency is interpolated.
        beta_slow: f64,
        /// Multiplies cosines and sines.
        attention_factor: f64,
        /// Round the ends of the ramp to whole dimensions.
        truncate: bool,
    },
    /// Llama 3.1: by wavelength, low frequencies divided, high ones kept, a smooth part between.
    Llama3 {
        /// The divisor of low frequencies.
        factor: f64,
        /// The trained length.
        original: usize,
        /// Wavelengths above `original / low` are divided.
        low: f64,
        /// Wavelengths below `original / high` are kept.
        high: f64,
    },
}

impl Rope {
    /// Reads `rope_parameters`, or `rope_theta` and `rope_scaling`. As in transformers, `rope_scaling` replaces
    /// `rope_parameters` with its `rope_theta`, unless it is null or empty.
    pub(crate) fn from_fields(
        fields: Fields<'_>,
        head_dim: usize,
        max_positions: usize,
    ) -> Result<Self, ModelError> {
        let parameters = fields.nested("rope_parameters")?;
        let replacing = fields.nested("rope_scaling")?.filter(|scaling| !scaling.is_empty());
        let scaling = replacing.or(parameters);
        let nested_theta = |place: Option<Fields<'_>>| {
            Ok::<_, ModelError>(
                place.map(|place| place.optional_positive("rope_theta")).transpose()?.flatten(),
            )
        };
        let theta = match nested_theta(scaling)? {
            Some(theta) => theta,
            None => fields.positive_or("rope_theta", DEFAULT_THETA)?,
        };
        if replacing.is_some()
            && let Some(unused) = nested_theta(parameters)?.filter(|unused| *unused != theta)
        {
            log::warn!(
                "config: rope_scaling replaces rope_parameters, whose rope_theta={unused} is not used; rope_theta is \
                 {theta}. Set rope_theta in rope_scaling."
            );
        }
        for place in [Some(fields), scaling].into_iter().flatten() {
            if let Some(share) =
                place.optional_positive("partial_rotary_factor")?.filter(|share| *share != 1.0)
            {
                return Err(place.error(
                    "partial_rotary_factor",
                    &share.into(),
                    "1 (partial rotation is not supported)",
                ));
            }
        }
        let rope = Self {
            theta,
            head_dim,
            max_position_embeddings: max_positions,
            scaling: match scaling {
                None => RopeScaling::Default,
                Some(scaling) => read_scaling(fields, scaling, max_positions)?,
            },
            divisors: read_divisors(fields, head_dim)?,
        };
        if matches!(rope.scaling, RopeScaling::Dynamic { .. }) && head_dim <= 2 {
            return Err(fields.error("head_dim", &head_dim.into(), "above 2 with dynamic rope scaling"));
        }
        Ok(rope)
    }

    /// The scaling of the frequencies.
    pub fn scaling(&self) -> &RopeScaling {
        &self.scaling
    }

    /// The length that the model was trained with, before any scaling.
    pub(crate) fn trained_len(&self) -> usize {
        match self.scaling {
            RopeScaling::Yarn { original, .. } | RopeScaling::Llama3 { original, .. } => original,
            _ => self.max_position_embeddings,
        }
    }

    /// Below this position, in requests with prompts up to this length, the angles depend on the position alone.
    pub fn shared_len(&self) -> usize {
        match self.scaling {
            RopeScaling::Dynamic { .. } => self.max_position_embeddings,
            _ => usize::MAX,
        }
    }

    /// Positions of the rope table of a model that computes `positions`: those for which the position is enough.
    pub(crate) fn table_len(&self, positions: usize) -> usize {
        positions.min(self.shared_len())
    }

    /// Angles per position.
    pub(crate) fn num_frequencies(&self) -> usize {
        self.head_dim / 2
    }

    /// The length on which the frequencies of `position` depend, in a request with a prompt of `prompt_len` tokens.
    /// Rows with the same length have the same frequencies.
    pub(crate) fn frequency_len(&self, position: usize, prompt_len: usize) -> usize {
        match self.scaling {
            RopeScaling::Dynamic { .. } => prompt_len.max(position + 1).max(self.max_position_embeddings),
            _ => 0,
        }
    }

    /// The frequencies for a [`frequency_len`](Self::frequency_len).
    pub(crate) fn frequencies(&self, frequency_len: usize) -> Frequencies {
        let (mut frequencies, factor) = self.scaled(frequency_len);
        if let Some(divisors) = &self.divisors {
            for (frequency, divisor) in frequencies.iter_mut().zip(divisors) {
                *frequency /= divisor;
            }
        }
        (frequencies, factor)
    }

    fn scaled(&self, frequency_len: usize) -> Frequencies {
        match self.scaling {
            RopeScaling::Default => (self.unscaled(self.theta), 1.0),
            RopeScaling::Linear { factor } => {
                let divide = |frequency| frequency / factor as f32;
                (self.unscaled(self.theta).into_iter().map(divide).collect(), 1.0)
            }
            RopeScaling::Dynamic { factor } => {
                let stretch = frequency_len.max(self.max_position_embeddings) as f64;
                let grown = factor * stretch / self.max_position_embeddings as f64 - (factor - 1.0);
                let width = self.head_dim as f64;
                (self.unscaled(self.theta * grown.powf(width / (width - 2.0))), 1.0)
            }
            RopeScaling::Yarn { factor, original, beta_fast, beta_slow, attention_factor, truncate } => {
                let (low, high) = self.yarn_ramp(original, beta_fast, beta_slow, truncate);
                let blend = |(index, frequency): (usize, f32)| {
                    let interpolated = frequency / factor as f32;
                    let share = ((index as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
                    interpolated * share + frequency * (1.0 - share)
                };
                (
                    self.unscaled(self.theta).into_iter().enumerate().map(blend).collect(),
                    attention_factor as f32,
                )
            }
            RopeScaling::Llama3 { factor, original, low, high } => {
                let original = original as f64;
                let smooth = |frequency: f32| {
                    let wavelength = 2.0 * std::f64::consts::PI / f64::from(frequency);
                    if wavelength > original / low {
                        frequency / factor as f32
                    } else if wavelength < original / high {
                        frequency
                    } else {
                        let share = ((original / wavelength - low) / (high - low)) as f32;
                        (1.0 - share) * frequency / factor as f32 + share * frequency
                    }
                };
                (self.unscaled(self.theta).into_iter().map(smooth).collect(), 1.0)
            }
        }
    }

    /// `theta ^ (-2i / head_dim)`, each operation rounded to float32.
    fn unscaled(&self, theta: f64) -> Vec<f32> {
        let theta = f64::from(theta as f32);
        (0..self.num_frequencies())
            .map(|index| (2 * index) as f32 / self.head_dim as f32)
            .map(|exponent| 1.0 / theta.powf(f64::from(exponent)) as f32)
            .collect()
    }

    /// The dimensions between which YaRN's ramp rises from kept (0) to interpolated (1).
    fn yarn_ramp(&self, original: usize, beta_fast: f64, beta_slow: f64, truncate: bool) -> (f64, f64) {
        let width = self.head_dim as f64;
        let dimension_of = |rotations: f64| {
            width * (original as f64 / (rotations * 2.0 * std::f64::consts::PI)).ln()
                / (2.0 * self.theta.ln())
        };
        let (mut low, mut high) = (dimension_of(beta_fast), dimension_of(beta_slow));
        if truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        let (low, high) = (low.max(0.0), high.min(width - 1.0));
        (low, if low == high { high + 0.001 } else { high })
    }
}

fn read_scaling(
    fields: Fields<'_>,
    scaling: Fields<'_>,
    max_positions: usize,
) -> Result<RopeScaling, ModelError> {
    let kind = match scaling.optional_text("rope_type")? {
        Some(kind) => kind,
        None => scaling.optional_text("type")?.unwrap_or("default"),
    };
    let original = || -> Result<usize, ModelError> {
        match scaling.optional_count("original_max_position_embeddings", MAX_POSITIONS)? {
            Some(original) => Ok(original),
            None => fields.count_or("original_max_position_embeddings", MAX_POSITIONS, max_positions),
        }
    };
    Ok(match kind {
        "default" => RopeScaling::Default,
        "linear" => RopeScaling::Linear { factor: scaling.positive("factor")? },
        "dynamic" => {
            let factor = scaling.positive("factor")?;
            if factor < 1.0 {
                return Err(scaling.error("factor", &factor.into(), "at least 1"));
            }
            RopeScaling::Dynamic { factor }
        }
        "yarn" => read_yarn(scaling, original()?, max_positions)?,
        "llama3" => {
            let (low, high) = (scaling.positive("low_freq_factor")?, scaling.positive("high_freq_factor")?);
            if low >= high {
                let limit = format!("below high_freq_factor={high}");
                return Err(scaling.error("low_freq_factor", &low.into(), limit));
            }
            RopeScaling::Llama3 { factor: scaling.positive("factor")?, original: original()?, low, high }
        }
        other => {
            let known = "default, linear, dynamic, yarn or llama3";
            return Err(scaling.error("rope_type", &other.into(), known));
        }
    })
}

fn read_yarn(scaling: Fields<'_>, original: usize, max_positions: usize) -> Result<RopeScaling, ModelError> {
    let factor = scaling.optional_positive("factor")?.unwrap_or(max_positions as f64 / original as f64);
    let magnitude =
        |scale: f64, weight: f64| if scale <= 1.0 { 1.0 } else { 0.1 * weight * scale.ln() + 1.0 };
    let attention_factor = match scaling.optional_positive("attention_factor")? {
        Some(given) => given,
        None => match (scaling.optional_positive("mscale")?, scaling.optional_positive("mscale_all_dim")?) {
            (Some(one), Some(all)) => magnitude(factor, one) / magnitude(factor, all),
            _ => magnitude(factor, 1.0),
        },
    };
    Ok(RopeScaling::Yarn {
        factor,
        original,
        beta_fast: scaling.positive_or("beta_fast", 32.0)?,
        beta_slow: scaling.positive_or("beta_slow", 1.0)?,
        attention_factor,
        truncate: scaling.flag_or("truncate", true)?,
    })
}

fn read_divisors(fields: Fields<'_>, head_dim: usize) -> Result<Option<Vec<f32>>, ModelError> {
    const NAME: &str = "rope_frequency_factors";
    let Some(list) = fields.optional_list(NAME)? else { return Ok(None) };
    if list.len() != head_dim / 2 {
        return Err(fields.error(
            NAME,
            &list.len().into(),
            format!("a list of head_dim/2={} numbers", head_dim / 2),
        ));
    }
    let read = |value: &serde_json::Value| {
        let number = value.as_f64().filter(|number| number.is_finite() && *number > 0.0);
        number.map(|number| number as f32).ok_or_else(|| fields.error(NAME, value, "finite numbers above 0"))
    };
    list.iter().map(read).collect::<Result<_, _>>().map(Some)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn rope(config: &Value) -> Result<Rope, ModelError> {
        Rope::from_fields(Fields::new(config), 8, 64)
    }

    #[test]
    fn both_config_formats_give_the_same_frequencies() {
        let old = rope(&json!({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}}))
            .expect("old");
        let new =
            rope(&json!({"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 4.0}}));
        assert_eq!(old, new.expect("new"));
        assert_eq!(old.frequencies(0).0[0], 0.25);
    }

    #[test]
    fn rope_scaling_replaces_rope_parameters() {
        let linear = |factor: f64| json!({"rope_type": "linear", "factor": factor});
        let theta = json!({"rope_type": "default", "rope_theta": 5e5});
        let with_theta = json!({"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6});
        for (config, expected) in [
            (
                json!({"rope_parameters": linear(2.0), "rope_scaling": linear(4.0)}),
                json!({"rope_scaling": linear(4.0)}),
            ),
            (
                json!({"rope_parameters": linear(2.0), "rope_scaling": linear(2.0)}),
                json!({"rope_scaling": linear(2.0)}),
            ),
            (
                json!({"rope_parameters": linear(2.0), "rope_scaling": null}),
                json!({"rope_parameters": linear(2.0)}),
            ),
            (
                json!({"rope_parameters": linear(2.0), "rope_scaling": {}}),
                json!({"rope_parameters": linear(2.0)}),
            ),
            (
                json!({"rope_parameters": null, "rope_scaling": linear(4.0)}),
                json!({"rope_scaling": linear(4.0)}),
            ),
            // The base is that of rope_scaling, else that beside it, else the default.
            (
                json!({"rope_parameters": theta, "rope_scaling": with_theta}),
                json!({"rope_parameters": with_theta}),
            ),
            (
                json!({"rope_parameters": theta, "rope_scaling": linear(2.0), "rope_theta": 3e5}),
                json!({"rope_scaling": linear(2.0), "rope_theta": 3e5}),
            ),
            (
                json!({"rope_parameters": theta, "rope_scaling": linear(2.0)}),
                json!({"rope_scaling": linear(2.0)}),
            ),
            (json!({"rope_scaling": with_theta, "rope_theta": 3e5}), json!({"rope_parameters": with_theta})),
        ] {
            assert_eq!(rope(&config).expect("valid"), rope(&expected).expect("valid"), "{config}");
        }
        let refused = json!({"rope_parameters": {"rope_theta": -1.0}, "rope_scaling": linear(2.0)});
        let message = rope(&refused).expect_err("refused").to_string();
        assert!(message.contains("rope_parameters.rope_theta"), "{message}");
    }

    #[test]
    fn dynamic_scaling_depends_only_on_the_request() {
        let config = json!({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}});
        let (dynamic, plain) = (rope(&config).expect("dynamic"), rope(&json!({})).expect("default"));
        assert_eq!(dynamic.frequencies(dynamic.frequency_len(3, 40)), plain.frequencies(0));
        // Every position of a long prompt shares the prompt's frequencies, whichever chunk it is in.
        assert_eq!(dynamic.frequency_len(0, 100), dynamic.frequency_len(99, 100));
        assert_ne!(dynamic.frequencies(dynamic.frequency_len(0, 100)), plain.frequencies(0));
        assert_eq!(dynamic.frequency_len(100, 100), 101);
        let shared = dynamic.shared_len();
        assert_eq!(dynamic.frequency_len(shared - 1, shared), dynamic.frequency_len(0, 1));
        assert_ne!(dynamic.frequency_len(shared, 1), dynamic.frequency_len(0, 1));
        assert_ne!(dynamic.frequency_len(0, shared + 1), dynamic.frequency_len(0, 1));
    }

    #[test]
    fn invalid_scaling_error_names_the_field() {
        for (config, field) in [
            (json!({"rope_theta": -1.0}), "rope_theta"),
            (json!({"rope_scaling": {"rope_type": "linear", "factor": 0}}), "rope_scaling.factor"),
            (json!({"rope_scaling": {"rope_type": "linear"}}), "rope_scaling.factor"),
            (json!({"rope_scaling": {"rope_type": "spiral", "factor": 2}}), "rope_scaling.rope_type"),
            (json!({"rope_scaling": 3}), "rope_scaling"),
            (json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor"),
            (json!({"rope_frequency_factors": [1.0]}), "rope_frequency_factors"),
            (
                json!({"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1}}),
                "rope_scaling.low_freq_factor",
            ),
        ] {
            let message = rope(&config).expect_err("refused").to_string();
            assert!(message.contains(field), "{message} should name {field}");
        }
    }
}
