//! The command line.

use crate::random;

/// What a run is asked for.
pub(crate) struct Options {
    pub(crate) seed: u64,
    /// Victims for each path of a walk; all without it.
    pub(crate) sample: Option<usize>,
    pub(crate) path: Option<String>,
}

impl Options {
    pub(crate) fn read(arguments: &[String]) -> Result<Self, String> {
        let mut options = Self {
            seed: random::seed(),
            sample: None,
            path: None,
        };
        let mut words = arguments.iter();
        while let Some(name) = words.next() {
            let value = words.next().ok_or(format!("{name} has no value"))?;
            let bad = |_| format!("{name} {value} is no number");
            match name.as_str() {
                "--seed" => options.seed = value.parse().map_err(bad)?,
                "--sample" => options.sample = Some(value.parse().map_err(bad)?),
                "--path" => options.path = Some(value.clone()),
                _ => return Err(format!("{name} is unknown")),
            }
        }
        Ok(options)
    }
}
