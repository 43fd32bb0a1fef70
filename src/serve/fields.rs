//! Reading a JSON object field by field, with errors that name the field.

use serde_json::{Map, Value};

use super::errors::ApiError;

/// A JSON object of a request. `null` counts as missing, and unknown fields are nobody's business.
#[derive(Clone, Copy)]
pub struct Fields<'a> {
    object: &'a Map<String, Value>,
    /// What the object is called, with a dot; empty at the top.
    path: &'a str,
}

impl<'a> Fields<'a> {
    /// The fields of `value`, which is called `path`.
    ///
    /// # Errors
    /// If it is no object.
    pub fn of(value: &'a Value, path: &'a str) -> Result<Self, ApiError> {
        match value.as_object() {
            Some(object) => Ok(Self { object, path }),
            None => Err(wrong(path, value, "an object")),
        }
    }

    /// A field's full name.
    pub fn name(&self, field: &str) -> String {
        match self.path.is_empty() {
            true => field.to_owned(),
            false => format!("{}.{field}", self.path),
        }
    }

    /// A field that is there.
    pub fn get(&self, field: &str) -> Option<&'a Value> {
        self.object.get(field).filter(|value| !value.is_null())
    }

    fn typed<T>(
        &self,
        field: &str,
        expected: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = self.get(field) else {
            return Ok(None);
        };
        read(value).map(Some).ok_or_else(|| wrong(&self.name(field), value, expected))
    }

    /// true or false.
    ///
    /// # Errors
    /// If it is something else; so for the functions below.
    pub fn bool(&self, field: &str) -> Result<Option<bool>, ApiError> {
        self.typed(field, "true or false", Value::as_bool)
    }

    /// A string.
    pub fn string(&self, field: &str) -> Result<Option<&'a str>, ApiError> {
        self.typed(field, "a string", Value::as_str)
    }

    /// A list.
    pub fn list(&self, field: &str) -> Result<Option<&'a Vec<Value>>, ApiError> {
        self.typed(field, "a list", Value::as_array)
    }

    /// A whole number between two.
    pub fn count(&self, field: &str, least: u64, most: u64) -> Result<Option<usize>, ApiError> {
        let expected = match most {
            u64::MAX => format!("a whole number of at least {least}"),
            _ => format!("a whole number from {least} to {most}"),
        };
        self.typed(field, &expected, |value| {
            // Some clients send 16.0.
            let whole =
                |number: f64| (number.fract() == 0.0 && number >= 0.0).then_some(number as u64);
            let number = value.as_u64().or_else(|| value.as_f64().and_then(whole))?;
            (least..=most).contains(&number).then_some(number as usize)
        })
    }

    /// A number between two.
    pub fn number(&self, field: &str, least: f64, most: f64) -> Result<Option<f32>, ApiError> {
        let expected = format!("a number from {least} to {most}");
        self.typed(field, &expected, |value| {
            let number = value.as_f64()?;
            (least..=most).contains(&number).then_some(number as f32)
        })
    }

    /// An object.
    pub fn object(&self, field: &str) -> Result<Option<&'a Map<String, Value>>, ApiError> {
        self.typed(field, "an object", Value::as_object)
    }
}

/// The error of a value that is something else than expected.
pub fn wrong(param: &str, value: &Value, expected: &str) -> ApiError {
    let found = match value {
        Value::String(_) => "a string".to_owned(),
        Value::Array(_) => "a list".to_owned(),
        Value::Object(_) => "an object".to_owned(),
        // Numbers and words are short, and no content of anybody's.
        short => short.to_string(),
    };
    ApiError::invalid(param, format!("found {found}, expected {expected}"))
}
