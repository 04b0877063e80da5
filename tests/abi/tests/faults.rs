//! A planted panic results in an errno and a log line.

use abi_tests::outside::{must, probe, provider_dir, system};

const PROBE: &str = env!("CARGO_BIN_EXE_abi-probe");

#[test]
fn a_panic_is_an_error_and_a_log_line() {
    let provider = provider_dir();
    for place in ["domain", "mr_reg", "cq_open"] {
        let mut command = probe(PROBE, &system(), &provider, "fault");
        command
            .arg(place)
            .env("FI_WEFT_FAULT", place)
            .env("FI_LOG_LEVEL", "warn");
        let output = must(command);
        let log = String::from_utf8_lossy(&output.stderr);
        assert!(
            log.contains("weft") && log.contains(&format!("planted by FI_WEFT_FAULT={place}")),
            "the log does not tell of it:\n{log}"
        );
    }
}

/// Calls that accept several kinds of objects try one after the other: only a refused call logs.
#[test]
fn a_call_that_succeeds_logs_no_refusal() {
    let mut command = probe(PROBE, &system(), &provider_dir(), "quiet");
    command.env("FI_LOG_LEVEL", "info");
    let output = must(command);
    let log = String::from_utf8_lossy(&output.stderr);
    let refusals = log.matches("is not an open object of class").count();
    assert_eq!(refusals, 1, "the last call alone is refused:\n{log}");
}

/// Without the parameter the same calls succeed: the other test sees the planted panic only.
#[test]
fn no_fault_without_the_parameter() {
    let mut command = probe(PROBE, &system(), &provider_dir(), "fault");
    command.arg("mr_reg");
    let output = command.output().expect("the probe starts");
    assert!(
        !output.status.success(),
        "fi_mr_reg failed with no fault planted"
    );
}
