//! Where processes listen.

use std::{
    collections::BTreeSet,
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

/// A process and all that it has started.
pub fn family(of: u32) -> Vec<u32> {
    let mut family = vec![of];
    let mut seen = 0;
    while let Some(&parent) = family.get(seen) {
        seen += 1;
        for entry in fs::read_dir("/proc").unwrap() {
            let path = entry.unwrap().path();
            let Ok(stat) = fs::read_to_string(path.join("stat")) else { continue };
            let Some(own) = path.file_name().and_then(|name| name.to_str()?.parse().ok()) else {
                continue;
            };
            if stat.rsplit(") ").next().unwrap().split(' ').nth(1) == Some(&parent.to_string()) {
                family.push(own);
            }
        }
    }
    family
}

/// An address as the kernel writes it: hexadecimal words in the machine's order of bytes.
fn address(text: &str) -> SocketAddr {
    let (address, port) = text.split_once(':').unwrap();
    let words: Vec<[u8; 4]> = (0..address.len() / 8)
        .map(|word| {
            u32::from_str_radix(&address[8 * word..8 * word + 8], 16).unwrap().to_ne_bytes()
        })
        .collect();
    let ip = match words[..] {
        [word] => IpAddr::V4(Ipv4Addr::from(word)),
        _ => IpAddr::V6(Ipv6Addr::from(<[u8; 16]>::try_from(words.concat()).unwrap())),
    };
    SocketAddr::new(ip, u16::from_str_radix(port, 16).unwrap())
}

/// Where a process and its children listen.
pub fn listeners(of: u32) -> BTreeSet<SocketAddr> {
    let mut all = BTreeSet::new();
    for process in family(of) {
        let Ok(open) = fs::read_dir(format!("/proc/{process}/fd")) else { continue };
        let links = open.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
        let sockets: BTreeSet<String> = links
            .filter_map(|link| {
                let inode = link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?;
                Some(inode.to_owned())
            })
            .collect();
        // TCP that listens, and UDP that takes from anyone.
        for (table, state) in [("tcp", "0A"), ("tcp6", "0A"), ("udp", "07"), ("udp6", "07")] {
            let Ok(text) = fs::read_to_string(format!("/proc/{process}/net/{table}")) else {
                continue;
            };
            for line in text.lines().skip(1) {
                let words: Vec<&str> = line.split_whitespace().collect();
                if words[3] == state && sockets.contains(words[9]) {
                    all.insert(address(words[1]));
                }
            }
        }
    }
    all
}
