//! Watching the connections from outside: noticing that a client has gone, or that one waits in vain.
//!
//! tiny_http gives no access to its sockets, and a write, if there is something to write at all,
//! succeeds once after the other side has closed. The kernel lists the state of every connection in
//! /proc/self/net/tcp, where one that the client has closed is no longer ESTABLISHED. Where that
//! file cannot be read or does not list our own port, only failing writes tell.
//!
//! tiny_http gives a new connection to an idle thread if it has any, and does not see that it has
//! given that thread another one already. So in a burst some connections wait for those before them
//! to *end*, which kept-alive ones do not. A nudge, a connection that opens and closes at once,
//! makes tiny_http start a thread, which goes on with one that waits. Each new client's first
//! request sends one, so a burst resolves itself; and the list shows those that nobody reads.

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How often the list is read while somebody waits for an answer, and while nobody does.
const INTERVAL: Duration = Duration::from_millis(20);
const IDLE_INTERVAL: Duration = Duration::from_secs(1);
/// The kernel walks a table of all connections there could be, some milliseconds on a large box:
/// reading takes at most one part in this many of the time.
const MOST_OF_TIME: u32 = 10;
/// Clients that are remembered, so that only their first request nudges.
const KNOWN_CLIENTS: usize = 4096;
/// Connections that are opened at a time for others that wait.
const MAX_NUDGES: usize = 16;
/// The kernel's numbers of states.
const ESTABLISHED: &str = "01";
const LISTENING: &str = "0A";
/// An empty queue.
const NOTHING: &str = "00000000";
/// Readings after which a connection that is not listed counts as gone. The list is made while it
/// changes, so one reading may miss what is there.
const MISSES: usize = 2;

/// Watches connections.
pub struct Watcher {
    shared: Arc<Shared>,
    next: AtomicU64,
    news: Sender<News>,
}

/// What the watching thread is told.
enum News {
    /// A new client sent its first request.
    Client,
    /// Somebody waits for an answer.
    Watched,
}

#[derive(Default)]
struct Shared {
    watched: Mutex<Vec<Watched>>,
    clients: Mutex<HashSet<SocketAddr>>,
}

struct Watched {
    id: u64,
    client: SocketAddr,
    gone: Arc<AtomicBool>,
    /// A list that was begun before says nothing of it: its client's port may have been another's.
    since: Instant,
    /// Readings in a row that did not list it.
    misses: usize,
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
        let shared = Arc::new(Shared::default());
        let (news, heard) = channel();
        let watching = shared.clone();
        // All addresses of this box: any of them will do for a nudge.
        let mut own = server;
        if server.ip().is_unspecified() {
            own.set_ip(match server {
                SocketAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
                SocketAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
            });
        }
        // Without the thread, failing writes still tell.
        let started = std::thread::Builder::new()
            .name("disconnects".into())
            .spawn(move || watch(&watching, &heard, own));
        if let Err(error) = started {
            log::warn!("clients that go away will be noticed late: {error}");
        }
        Self { shared, next: AtomicU64::new(0), news }
    }

    /// A request came from `client`.
    pub fn heard_from(&self, client: SocketAddr) {
        let mut clients = self.shared.clients.lock().unwrap_or_else(PoisonError::into_inner);
        if clients.len() >= KNOWN_CLIENTS {
            clients.clear();
        }
        if clients.insert(client) {
            // Without the thread there is nobody to nudge.
            let _ = self.news.send(News::Client);
        }
    }

    /// Sets `gone` when the client closes its connection.
    pub fn watch(&self, client: SocketAddr, gone: Arc<AtomicBool>) -> Watch {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (client, since) = (canonical(client), Instant::now());
        self.shared.watched().push(Watched { id, client, gone, since, misses: 0 });
        // Without the thread, failing writes still tell.
        let _ = self.news.send(News::Watched);
        Watch { shared: self.shared.clone(), id }
    }
}

/// Looks again and again until the watcher is gone.
fn watch(shared: &Shared, news: &Receiver<News>, server: SocketAddr) {
    // If one fails, the next look tries again.
    let nudge = || drop(TcpStream::connect_timeout(&server, INTERVAL));
    let mut unread: HashSet<SocketAddr> = HashSet::new();
    let (mut looked, mut pause) = (Instant::now(), IDLE_INTERVAL);
    let mut rest = INTERVAL;
    loop {
        match news.recv_timeout((looked + pause).saturating_duration_since(Instant::now())) {
            Ok(News::Client) => nudge(),
            Ok(News::Watched) => pause = rest,
            Err(RecvTimeoutError::Disconnected) => return,
            Err(RecvTimeoutError::Timeout) => {
                looked = Instant::now();
                let connections = connections(server).unwrap_or_default();
                rest = INTERVAL.max(looked.elapsed() * MOST_OF_TIME);
                let mut watched = shared.watched();
                if !connections.is_empty() {
                    judge(&mut watched, &connections, looked);
                }
                let idle = watched.is_empty();
                drop(watched);
                let reads = |(client, seen): (&SocketAddr, &Seen)| seen.unread.then_some(*client);
                let now: HashSet<SocketAddr> = connections.iter().filter_map(reads).collect();
                now.intersection(&unread).take(MAX_NUDGES).for_each(|_| nudge());
                pause = if idle && now.is_empty() { IDLE_INTERVAL } else { rest };
                unread = now;
            }
        }
    }
}

/// Looks for all watched connections in a list whose reading began at `begun`.
fn judge(watched: &mut [Watched], connections: &HashMap<SocketAddr, Seen>, begun: Instant) {
    let known = watched.iter_mut().filter(|watched| watched.since < begun);
    known.for_each(|watched| watched.look(connections.get(&watched.client)));
}

impl Watched {
    fn look(&mut self, seen: Option<&Seen>) {
        match seen {
            Some(seen) if seen.established => self.misses = 0,
            Some(_) => self.misses = MISSES,
            None => self.misses += 1,
        }
        if self.misses >= MISSES {
            self.gone.store(true, Ordering::SeqCst);
        }
    }
}

/// What the list says of a connection.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Seen {
    established: bool,
    /// Bytes have come that were not read.
    unread: bool,
}

/// Clients of `server`; none if the list does not show that we listen. The listening socket itself
/// is among them, so that the list is never empty.
fn connections(server: SocketAddr) -> Option<HashMap<SocketAddr, Seen>> {
    let mut connections: HashMap<SocketAddr, Seen> = HashMap::new();
    let mut listening = false;
    // A connection is listed by its socket's family, whatever the client's.
    let file = if server.is_ipv4() { "/proc/self/net/tcp" } else { "/proc/self/net/tcp6" };
    let list = std::fs::read_to_string(file).unwrap_or_default();
    for line in list.lines() {
        let Some((local, remote, state, queues)) = connection(line) else {
            continue;
        };
        if local.port() == server.port() {
            listening |= state == LISTENING;
            let seen = connections.entry(remote).or_default();
            let unread = queues.split_once(':').is_some_and(|(_, rx)| rx != NOTHING);
            seen.established |= state == ESTABLISHED;
            seen.unread |= state == ESTABLISHED && unread;
        }
    }
    listening.then_some(connections)
}

/// Local address, remote address, state and queues of a line `sl local remote state tx:rx …`.
fn connection(line: &str) -> Option<(SocketAddr, SocketAddr, &str, &str)> {
    let mut words = line.split_whitespace().skip(1);
    Some((address(words.next()?)?, address(words.next()?)?, words.next()?, words.next()?))
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
    use std::net::TcpListener;

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

    /// A port that one client has left is soon another's: under load, a list that was being read when
    /// the other's request came ended that request.
    #[test]
    fn a_list_from_before_a_request_says_nothing_of_it() {
        let client: SocketAddr = "127.0.0.1:40000".parse().expect("an address");
        let begun = Instant::now();
        let mut watched = [Watched {
            id: 0,
            client,
            gone: Arc::default(),
            since: begun + Duration::from_millis(1),
            misses: 0,
        }];
        let closed = HashMap::from([(client, Seen::default())]);
        for _ in 0..3 {
            judge(&mut watched, &closed, begun);
            judge(&mut watched, &HashMap::new(), begun);
        }
        assert!(!watched[0].gone.load(Ordering::SeqCst));
        judge(&mut watched, &closed, begun + Duration::from_millis(2));
        assert!(watched[0].gone.load(Ordering::SeqCst));
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
        std::thread::sleep(5 * INTERVAL);
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
