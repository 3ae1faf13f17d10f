//! Ranks on GPUs, as processes: this binary again, told by `MOE_LORA_TEST_ROLE` what to do.

use std::net::TcpListener;
use std::process::{Child, Command, Output, Stdio};

/// What a process is told to do.
pub const ROLE: &str = "MOE_LORA_TEST_ROLE";

/// `N` processes of one test in a role, a GPU each.
pub fn processes<const N: usize>(test: &str, role: &str, vars: &[(&str, &str)]) -> [Child; N] {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr();
    let port = port.unwrap().port().to_string();
    std::array::from_fn(|rank| {
        Command::new(std::env::current_exe().unwrap())
            .args([test, "--exact", "--nocapture"])
            .env(ROLE, role)
            .env("RANK", rank.to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env("WORLD_SIZE", N.to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", &port)
            .env("MOE_LORA_TOKEN", "a token for tests on one machine")
            .envs(vars.iter().copied())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    })
}

/// What a process has said, once it has ended.
pub fn output(child: Child) -> (Output, String) {
    let output = child.wait_with_output().unwrap();
    let text = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    let text = text.concat();
    (output, text)
}
