//! What this machine has: cores and available memory.

use std::path::{Path, PathBuf};

use gpipe::Bytes;

/// Where Linux reports memory.
const MEMINFO: &str = "/proc/meminfo";
/// Where Linux counts what this process does.
const OWN_STATUS: &str = "/proc/self/stat";
/// The control groups of this process, and the folder of their files.
const OWN_CGROUPS: &str = "/proc/self/cgroup";
const CGROUPS: &str = "/sys/fs/cgroup";
/// Maximum depth of control groups, which bounds the walk up.
const CGROUP_DEPTH_MAX: usize = 64;

/// How much more memory this process may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Available {
    pub bytes: Bytes,
    /// The file that sets this limit.
    pub by: String,
}

/// The number of cores that this process may run on.
pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// How many pages of memory this process has touched for the first time. `None` if the system does
/// not report it.
pub(crate) fn new_pages() -> Option<u64> {
    minor_faults(&std::fs::read_to_string(OWN_STATUS).ok()?)
}

/// `minflt` of /proc/self/stat. The name before it, in brackets, may hold anything.
fn minor_faults(text: &str) -> Option<u64> {
    let (_, fields) = text.rsplit_once(')')?;
    fields.split_whitespace().nth(7)?.parse().ok()
}

/// The minimum of the machine's available memory and what the control groups of this process leave.
/// `None` if the system does not report either.
pub(crate) fn available() -> Option<Available> {
    let machine = std::fs::read_to_string(MEMINFO).ok().and_then(|text| mem_available(&text));
    let machine = machine.map(|bytes| Available { bytes, by: format!("{MEMINFO}, MemAvailable") });
    let groups = std::fs::read_to_string(OWN_CGROUPS).unwrap_or_default();
    let groups = folders(&groups, Path::new(CGROUPS)).into_iter().filter_map(|own| left_in(&own));
    machine.into_iter().chain(groups).min_by_key(|available| available.bytes)
}

/// `MemAvailable` of /proc/meminfo: the memory available without swapping.
fn mem_available(text: &str) -> Option<Bytes> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(Bytes(kib.saturating_mul(1024)))
}

/// A control group's folder.
#[derive(Debug, PartialEq, Eq)]
struct Group {
    folder: PathBuf,
    /// Whether it belongs to version 1 of cgroups, whose files have other names.
    is_old: bool,
}

/// The folders of the control groups that limit a process's memory, with all their ancestors, whose
/// limits apply too.
fn folders(own: &str, root: &Path) -> Vec<Group> {
    let mut found = Vec::new();
    for line in own.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let is_old = controllers.split(',').any(|name| name == "memory");
        if !is_old && !controllers.is_empty() {
            continue;
        }
        let top = if is_old { root.join("memory") } else { root.to_owned() };
        let own = top.join(path.trim_start_matches('/'));
        let above = own.ancestors().take(CGROUP_DEPTH_MAX).take_while(|up| up.starts_with(&top));
        found.extend(above.map(|folder| Group { folder: folder.to_owned(), is_old }));
    }
    found
}

/// The memory that a control group's limit leaves. Inactive cached files count as free, because the
/// system reclaims them when memory is short.
fn left_in(group: &Group) -> Option<Available> {
    let [limit, used, cached] = match group.is_old {
        false => ["memory.max", "memory.current", "inactive_file"],
        true => ["memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"],
    };
    let read = |name: &str| std::fs::read_to_string(group.folder.join(name)).ok();
    let number = |name: &str| read(name)?.trim().parse::<u64>().ok();
    let most = number(limit)?; // "max" is no limit
    let statistics = read("memory.stat").unwrap_or_default();
    let cached = statistics.lines().find_map(|line| line.strip_prefix(cached)?.trim().parse().ok());
    let used = number(used)?.saturating_sub(cached.unwrap_or(0));
    let by = group.folder.join(limit).display().to_string();
    Some(Available { bytes: Bytes(most.saturating_sub(used)), by })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oracle_what_linux_says_of_its_memory_is_read() {
        let text = "MemTotal:       24000000 kB\nMemAvailable:    1000 kB\nSwapFree: 7 kB\n";
        assert_eq!(mem_available(text), Some(Bytes(1_024_000)));
        assert_eq!(mem_available("MemTotal: 5 kB\n"), None);
        assert!(available().is_some_and(|own| own.bytes > Bytes(0)) && cores() > 0);
    }

    #[test]
    fn oracle_new_pages_are_counted() {
        let text = "7 (a) b (c)) S 1 7 7 0 -1 4194560 123 0 2 0 5 3";
        assert_eq!((minor_faults(text), minor_faults("7")), (Some(123), None));
        let before = new_pages().unwrap();
        let memory = vec![1_u8; 64 << 20]; // pages have 4 KiB, or 2 MiB, or any size between
        assert!(new_pages().unwrap() >= before + 32, "{}", memory.len());
    }

    #[test]
    fn oracle_the_least_of_all_groups_limits() {
        let root = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = root.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        // Version 2: the limit is that of the parent group.
        write("a/b/memory.max", "max\n");
        write("a/memory.max", "1000\n");
        write("a/memory.current", "700\n");
        write("a/memory.stat", "anon 5\ninactive_file 100\nactive_file 50\n");
        let groups = folders("0::/a/b\n", root.path());
        let left: Vec<_> = groups.iter().filter_map(left_in).collect();
        assert_eq!((left.len(), left[0].bytes), (1, Bytes(400)));
        assert!(left[0].by.ends_with("a/memory.max"), "{left:?}");
        // Version 1, and controllers that do not limit memory.
        write("memory/x/memory.limit_in_bytes", "500\n");
        write("memory/x/memory.usage_in_bytes", "600\n");
        let groups = folders("3:cpu,cpuacct:/y\n2:memory:/x\n", root.path());
        assert_eq!(groups.len(), 2);
        let left: Vec<_> = groups.iter().filter_map(left_in).collect();
        assert_eq!((left.len(), left[0].bytes), (1, Bytes(0)));
    }
}
