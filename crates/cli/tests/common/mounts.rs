//! The command where disks are not as usual.

use std::process::Command;

use super::{Folder, process::output, skip};

/// Runs `script`, in which `$GPIPE` is the command, as root of namespaces of its own, where it may
/// mount. `None` where the system does not allow it, which is written down for `test`.
pub fn with_mounts(folder: &Folder, test: &str, script: &str) -> Option<String> {
    let allowed = "mount -t tmpfs -o size=64k tmpfs .";
    let unshare = |script: &str| {
        let mut command = Command::new("bash");
        let unshare = r#"exec unshare --user --map-root-user --mount bash -ec "$1""#;
        command.args(["-c", unshare, "bash", script]).current_dir(folder.path(""));
        command.env("GPIPE", env!("CARGO_BIN_EXE_gpipe"));
        output(&mut command)
    };
    if !unshare(allowed).status.success() {
        skip(test, "a process may not have mounts of its own here");
        return None;
    }
    let output = unshare(script);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{script}: {errors}");
    Some(String::from_utf8(output.stdout).unwrap())
}
