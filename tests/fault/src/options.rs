//! The command line.

use crate::random;

/// The options of a run.
pub(crate) struct Options {
    pub(crate) seed: u64,
    /// Number of random kills, and the minutes after which no more are done.
    pub(crate) kills: usize,
    pub(crate) minutes: f64,
    /// Number of processes; without it two to eight in turn.
    pub(crate) processes: Option<usize>,
    /// Number of victims per path of a walk; without it one per instruction.
    pub(crate) sample: Option<usize>,
    pub(crate) path: Option<String>,
    /// Whether the kernel refuses copies between processes.
    pub(crate) refuse: bool,
}

impl Options {
    pub(crate) fn read(arguments: &[String]) -> Result<Self, String> {
        let mut options = Self {
            seed: random::seed(),
            kills: 2000,
            minutes: 1e6,
            processes: None,
            sample: None,
            path: None,
            refuse: false,
        };
        let mut words = arguments.iter();
        while let Some(name) = words.next() {
            let value = words.next().ok_or(format!("{name} has no value"))?;
            let bad = |_| format!("{name} {value} is no number");
            match name.as_str() {
                "--seed" => options.seed = value.parse().map_err(bad)?,
                "--kills" => options.kills = value.parse().map_err(bad)?,
                "--processes" => options.processes = Some(value.parse().map_err(bad)?),
                "--minutes" => {
                    options.minutes = value.parse().map_err(|_| format!("{name} {value}"))?;
                }
                "--sample" => options.sample = Some(value.parse().map_err(bad)?),
                "--refuse" if value == "copies" => options.refuse = true,
                "--path" => options.path = Some(value.clone()),
                _ => return Err(format!("{name} is unknown")),
            }
        }
        Ok(options)
    }
}
