//! Visits of the schemas in a JSON schema.

use serde_json::{Map, Value};

/// Keywords whose value maps names to schemas.
const NAMED_SCHEMAS: [&str; 5] =
    ["$defs", "definitions", "dependentSchemas", "patternProperties", "properties"];
/// Keywords whose values are data.
pub(super) const LITERALS: [&str; 2] = ["const", "enum"];

/// Calls `visit` with the keywords of each schema. The value of an unknown keyword counts as a schema, because a
/// reference may lead there. The caller has bounded the nesting.
pub(super) fn each_schema(
    value: &mut Value,
    visit: &mut impl FnMut(&mut Map<String, Value>) -> Result<(), String>,
) -> Result<(), String> {
    match value {
        Value::Array(schemas) => schemas.iter_mut().try_for_each(|schema| each_schema(schema, visit)),
        Value::Object(keywords) => {
            visit(keywords)?;
            for (keyword, value) in keywords {
                match value {
                    _ if LITERALS.contains(&keyword.as_str()) => {}
                    Value::Object(schemas) if NAMED_SCHEMAS.contains(&keyword.as_str()) => {
                        schemas.values_mut().try_for_each(|schema| each_schema(schema, visit))?;
                    }
                    _ => each_schema(value, visit)?,
                }
            }
            Ok(())
        }
        _ => Ok(()),
    }
}
