//! Noticing that a client has gone.
//!
//! tiny_http gives no access to its sockets, and a write, if there is something to write at all,
//! succeeds once after the other side has closed. The kernel lists the state of every connection in
//! /proc/self/net/tcp, where one that the client has closed is no longer ESTABLISHED. Where that
//! file cannot be read, only failing writes tell.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

/// How often the list is read while somebody waits for an answer.
const INTERVAL: Duration = Duration::from_millis(20);
/// The kernel's number of the state.
const ESTABLISHED: &str = "01";

/// Watches connections.
pub struct Watcher {
    shared: Arc<Shared>,
    next: AtomicU64,
}

struct Shared {
    watched: Mutex<Vec<Watched>>,
    wake: Condvar,
}

struct Watched {
    id: u64,
    client: SocketAddr,
    gone: Arc<AtomicBool>,
    /// It was in the list once; otherwise the list tells nothing of it.
    seen: bool,
}

impl Shared {
    fn watched(&self) -> MutexGuard<'_, Vec<Watched>> {
        // A list of watched connections is whole whatever thread ended.
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ends the watch when dropped.
pub struct Watch {
    shared: Arc<Shared>,
    id: u64,
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.shared.watched().retain(|watched| watched.id != self.id);
    }
}

impl Watcher {
    /// Watches connections to `server`.
    pub fn new(server: SocketAddr) -> Self {
        let shared = Arc::new(Shared { watched: Mutex::default(), wake: Condvar::new() });
        let weak = Arc::downgrade(&shared);
        // Without the thread, failing writes still tell.
        let started = std::thread::Builder::new()
            .name("disconnects".into())
            .spawn(move || while look(&weak, server.port()) {});
        if let Err(error) = started {
            log::warn!("clients that go away will be noticed late: {error}");
        }
        Self { shared, next: AtomicU64::new(0) }
    }

    /// Sets `gone` when the client closes its connection.
    pub fn watch(&self, client: SocketAddr, gone: Arc<AtomicBool>) -> Watch {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        self.shared.watched().push(Watched { id, client: canonical(client), gone, seen: false });
        self.shared.wake.notify_one();
        Watch { shared: self.shared.clone(), id }
    }
}

/// Looks once, if there is somebody to look for; false when the watcher is gone.
fn look(shared: &Weak<Shared>, port: u16) -> bool {
    let Some(shared) = shared.upgrade() else {
        return false;
    };
    let watched = shared.watched();
    let wait = shared.wake.wait_timeout_while(watched, Duration::from_secs(1), |w| w.is_empty());
    let idle = wait.unwrap_or_else(PoisonError::into_inner).0.is_empty();
    if !idle {
        let clients = established(port);
        for watched in shared.watched().iter_mut() {
            match clients.contains(&watched.client) {
                true => watched.seen = true,
                false if watched.seen => watched.gone.store(true, Ordering::SeqCst),
                false => {}
            }
        }
        drop(shared);
        std::thread::sleep(INTERVAL);
    }
    true
}

/// Clients with an established connection to `port`.
fn established(port: u16) -> Vec<SocketAddr> {
    let mut clients = Vec::new();
    for file in ["/proc/self/net/tcp", "/proc/self/net/tcp6"] {
        if let Ok(list) = std::fs::read_to_string(file) {
            clients.extend(list.lines().filter_map(|line| client_of(line, port)));
        }
    }
    clients
}

/// The client of a line `sl local remote state …`, if it is an established connection to `port`.
fn client_of(line: &str, port: u16) -> Option<SocketAddr> {
    let mut words = line.split_whitespace().skip(1);
    let (local, remote, state) = (words.next()?, words.next()?, words.next()?);
    (state == ESTABLISHED && address(local)?.port() == port).then(|| address(remote))?
}

/// `0100007F:1F40`: each group of 8 digits is a word in the machine's byte order.
fn address(text: &str) -> Option<SocketAddr> {
    let (ip, port) = text.split_once(':').filter(|(ip, _)| ip.len() % 8 == 0)?;
    let mut bytes = Vec::new();
    for word in ip.as_bytes().chunks(8) {
        let word = u32::from_str_radix(std::str::from_utf8(word).ok()?, 16).ok()?;
        bytes.extend(word.to_ne_bytes());
    }
    let ip = match bytes.len() {
        4 => IpAddr::V4(Ipv4Addr::from(<[u8; 4]>::try_from(bytes).ok()?)),
        16 => IpAddr::V6(Ipv6Addr::from(<[u8; 16]>::try_from(bytes).ok()?)),
        _ => return None,
    };
    let port = u16::from_str_radix(port, 16).ok()?;
    Some(canonical(SocketAddr::new(ip, port)))
}

/// An IPv4 client of an IPv6 socket is listed as either.
fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};
    use std::time::Instant;

    #[test]
    fn addresses_are_read_as_the_kernel_writes_them() {
        let v4 = address("0100007F:1F40").expect("an address");
        assert_eq!(v4, "127.0.0.1:8000".parse().expect("an address"));
        let mapped = address("0000000000000000FFFF00000100007F:0050").expect("an address");
        assert_eq!(mapped, "127.0.0.1:80".parse().expect("an address"));
        let v6 = address("00000000000000000000000001000000:0050").expect("an address");
        assert_eq!(v6, "[::1]:80".parse().expect("an address"));
        for bad in ["", ":", "01:1", "0100007F", "zz00007F:1F40", "é:1"] {
            assert_eq!(address(bad), None);
        }
    }

    #[test]
    fn a_closed_connection_is_noticed_and_an_open_one_is_not() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let server = listener.local_addr().expect("an address");
        let (staying, leaving) = (TcpStream::connect(server), TcpStream::connect(server));
        let (staying, leaving) = (staying.expect("connected"), leaving.expect("connected"));
        let accepted = (listener.accept(), listener.accept());
        let watcher = Watcher::new(server);
        let watch = |stream: &TcpStream| {
            let gone = Arc::new(AtomicBool::new(false));
            let watch = watcher.watch(stream.local_addr().expect("an address"), gone.clone());
            (watch, gone)
        };
        let (stays, leaves) = (watch(&staying), watch(&leaving));
        std::thread::sleep(3 * INTERVAL);
        assert!(!leaves.1.load(Ordering::SeqCst));
        drop(leaving);
        let closed = Instant::now();
        while !leaves.1.load(Ordering::SeqCst) {
            assert!(closed.elapsed() < Duration::from_secs(5), "the client's end was not noticed");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(!stays.1.load(Ordering::SeqCst));
        drop((staying, accepted));
    }
}
