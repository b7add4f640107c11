//! A relay between nodes and a server that they share: it counts commands, and fails as networks do.
//!
//! For Redis it reads the frames of both directions, so that a fault may speak of a command or of its reply. A reply
//! that is lost takes everything behind it with it, as on a real connection: no reply is ever given to another command.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::sync::{mpsc, watch};
use tokio::task::AbortHandle;

/// Verbs that a call waits for. Everything else that nodes say to Redis is of the background.
pub const OF_CALLS: [&str; 2] = ["admit", "settle"];

/// A relay; it stops when dropped.
pub struct Relay {
    pub address: SocketAddr,
    shared: Arc<Shared>,
    accepting: AbortHandle,
}

struct Shared {
    state: Mutex<State>,
    /// Counts up when all connections are to end.
    cuts: watch::Sender<u64>,
    redis: bool,
}

struct State {
    target: SocketAddr,
    gate: Gate,
    delay: Duration,
    faults: Vec<Fault>,
    commands: Vec<Command>,
}

/// What becomes of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    Pass,
    /// Connections are taken, and nothing ever comes of them.
    Silent,
    /// Connections end at once.
    Closed,
}

/// Something that goes wrong once.
#[derive(Clone, Debug)]
pub struct Fault {
    /// Of commands with this verb; without one, of those that calls wait for.
    pub verb: Option<String>,
    /// Which of them, from 1.
    pub nth: usize,
    pub what: Effect,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// The server has run it, its reply and all that follows is lost.
    LoseReply,
    /// The server has run it, the connection ends instead of its reply.
    CloseForReply,
    ResetForReply,
    /// The connection ends before the server has it.
    CloseBefore,
    /// Its reply, and all behind it, comes later.
    Late(Duration),
}

/// A command that went through.
#[derive(Clone, Debug)]
pub struct Command {
    /// `FCALL`, `SCRIPT LOAD`.
    pub name: String,
    /// What it runs, where it runs a verb.
    pub verb: String,
    /// The rest of it, where it takes a script in.
    pub script: Option<Vec<u8>>,
    /// A reply came that is no error.
    pub answered: bool,
    /// What a verb was answered: its first word.
    pub answer: String,
}

impl Relay {
    pub async fn start(target: SocketAddr, redis: bool) -> Result<Self, String> {
        let bound = runtime().spawn(TcpListener::bind("127.0.0.1:0")).await.map_err(|e| e.to_string())?;
        let listener = bound.map_err(|e| e.to_string())?;
        let address = listener.local_addr().map_err(|e| e.to_string())?;
        let state =
            State { target, gate: Gate::Pass, delay: Duration::ZERO, faults: vec![], commands: vec![] };
        let shared = Arc::new(Shared { state: Mutex::new(state), cuts: watch::channel(0).0, redis });
        let accepting = runtime().spawn(accept(listener, Arc::clone(&shared))).abort_handle();
        Ok(Self { address, shared, accepting })
    }

    /// Ends all connections.
    pub fn cut(&self) {
        self.shared.cuts.send_modify(|cuts| *cuts += 1);
    }

    /// What was lost on the way does not come later: connections that saw it end.
    pub fn set_gate(&self, gate: Gate) {
        let before = std::mem::replace(&mut self.shared.lock().gate, gate);
        if before != gate && gate != Gate::Silent {
            self.cut();
        }
    }

    /// From now on all goes to another server.
    pub fn turn_to(&self, target: SocketAddr) {
        self.shared.lock().target = target;
        self.cut();
    }

    pub fn set_delay(&self, delay: Duration) {
        self.shared.lock().delay = delay;
    }

    pub fn add(&self, fault: Fault) {
        self.shared.lock().faults.push(fault);
    }

    /// Nothing goes wrong any more.
    pub fn mend(&self) {
        {
            let mut state = self.shared.lock();
            state.faults.clear();
            state.delay = Duration::ZERO;
        }
        self.set_gate(Gate::Pass);
    }

    /// Whether anything goes wrong, or is yet to.
    pub fn is_faulty(&self) -> bool {
        let state = self.shared.lock();
        state.gate != Gate::Pass || !state.delay.is_zero() || !state.faults.is_empty()
    }

    /// The commands since the last look that forgot them.
    pub fn commands(&self) -> Vec<Command> {
        self.shared.lock().commands.clone()
    }

    pub fn forget(&self) {
        self.shared.lock().commands.clear();
    }

    /// Commands with this verb whose reply came.
    pub fn answered(&self, verb: &str) -> usize {
        self.shared.lock().commands.iter().filter(|c| c.verb == verb && c.answered).count()
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.accepting.abort();
        self.cut();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("a relay's state")
    }

    /// Notes a command; answers its place and what becomes of it.
    fn note(&self, frame: &[u8]) -> (usize, Option<Effect>) {
        let command = read_command(frame);
        let mut state = self.lock();
        let due = state.faults.iter_mut().position(|fault| {
            let meant = match &fault.verb {
                Some(verb) => *verb == command.verb,
                None => OF_CALLS.contains(&command.verb.as_str()),
            };
            fault.nth -= usize::from(meant);
            meant && fault.nth == 0
        });
        let effect = due.map(|index| state.faults.remove(index).what);
        state.commands.push(command);
        (state.commands.len() - 1, effect)
    }
}

/// Of their own: nodes wait for Redis for no more than 50 ms, and must not wait for the runner.
fn runtime() -> &'static Runtime {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME.get_or_init(|| {
        let built = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        built.expect("a runtime for relays")
    })
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    while let Ok((near, _)) = listener.accept().await {
        tokio::spawn(connection(near, Arc::clone(&shared)));
    }
}

/// What the two directions of a connection tell each other.
#[derive(Default)]
struct Link {
    /// Commands without a reply yet.
    waiting: Mutex<VecDeque<(usize, Option<Effect>)>>,
}

/// How a direction ended.
enum End {
    Close,
    Reset,
}

async fn connection(mut near: TcpStream, shared: Arc<Shared>) {
    let mut cuts = shared.cuts.subscribe();
    cuts.mark_unchanged();
    let (target, gate) = {
        let state = shared.lock();
        (state.target, state.gate)
    };
    let cut = async {
        // Ends with the relay too.
        let _cut = cuts.changed().await;
    };
    tokio::pin!(cut);
    match gate {
        Gate::Closed => return,
        Gate::Silent => return cut.await,
        Gate::Pass => {}
    }
    let Ok(mut far) = TcpStream::connect(target).await else { return };
    for stream in [&near, &far] {
        let _plain = stream.set_nodelay(true);
    }
    let end = {
        let ((near_in, near_out), (far_in, far_out)) = (near.split(), far.split());
        let link = Link::default();
        let (late, writes) = mpsc::unbounded_channel();
        tokio::select! {
            end = forth(near_in, far_out, &shared, &link) => end,
            end = back(far_in, late, &shared, &link) => end,
            () = write_late(near_out, writes) => End::Close,
            () = cut => End::Close,
        }
    };
    if let End::Reset = end {
        let _reset = near.set_zero_linger();
    }
}

/// From a node to its server.
async fn forth(mut from: ReadHalf<'_>, mut to: WriteHalf<'_>, shared: &Shared, link: &Link) -> End {
    let (mut buffer, mut piece) = (vec![], vec![0; 64 << 10]);
    loop {
        let Ok(count @ 1..) = from.read(&mut piece).await else { return End::Close };
        if shared.lock().gate == Gate::Silent {
            continue;
        }
        buffer.extend_from_slice(&piece[..count]);
        let mut passed = 0;
        while shared.redis
            && let Some(length) = frame(&buffer[passed..])
        {
            let (index, effect) = shared.note(&buffer[passed..passed + length]);
            if effect == Some(Effect::CloseBefore) {
                let _gone = to.write_all(&buffer[..passed]).await;
                return End::Close;
            }
            link.waiting.lock().expect("commands").push_back((index, effect));
            passed += length;
        }
        let ready = if shared.redis { passed } else { buffer.len() };
        if to.write_all(&buffer[..ready]).await.is_err() {
            return End::Close;
        }
        buffer.drain(..ready);
    }
}

type Late = (Instant, Vec<u8>);

/// From the server to its node.
async fn back(mut from: ReadHalf<'_>, to: mpsc::UnboundedSender<Late>, shared: &Shared, link: &Link) -> End {
    let (mut buffer, mut piece) = (vec![], vec![0; 64 << 10]);
    let (mut lost, mut late) = (false, Duration::ZERO);
    loop {
        let Ok(count @ 1..) = from.read(&mut piece).await else { return End::Close };
        let (gate, delay) = {
            let state = shared.lock();
            (state.gate, state.delay)
        };
        if lost || gate == Gate::Silent {
            lost = true;
            continue;
        }
        buffer.extend_from_slice(&piece[..count]);
        let mut ready = 0;
        while shared.redis
            && let Some(length) = frame(&buffer[ready..])
        {
            // What is pushed belongs to no command.
            if buffer[ready] != b'>'
                && let Some((index, effect)) = link.waiting.lock().expect("commands").pop_front()
            {
                match effect {
                    Some(Effect::LoseReply) => lost = true,
                    Some(Effect::CloseForReply) => return End::Close,
                    Some(Effect::ResetForReply) => return End::Reset,
                    Some(Effect::Late(by)) => late = late.max(by),
                    Some(Effect::CloseBefore) | None => {}
                }
                if lost {
                    break;
                }
                if buffer[ready] != b'-'
                    && let Some(command) = shared.lock().commands.get_mut(index)
                {
                    command.answered = true;
                    let first = words(&buffer[ready..ready + length]).into_iter().next().unwrap_or_default();
                    command.answer = String::from_utf8_lossy(&first).into_owned();
                }
            }
            ready += length;
        }
        let ready = if shared.redis { ready } else { buffer.len() };
        let due = Instant::now() + delay + late;
        if to.send((due, buffer.drain(..ready).collect())).is_err() {
            return End::Close;
        }
    }
}

async fn write_late(mut to: WriteHalf<'_>, mut writes: mpsc::UnboundedReceiver<Late>) {
    while let Some((due, bytes)) = writes.recv().await {
        tokio::time::sleep_until(due.into()).await;
        if to.write_all(&bytes).await.is_err() {
            return;
        }
    }
}

fn read_command(frame: &[u8]) -> Command {
    let words = words(frame);
    let text = |index: usize| {
        words.get(index).map(|word| String::from_utf8_lossy(word).into_owned()).unwrap_or_default()
    };
    let first = text(0).to_uppercase();
    let mut name = first.clone();
    if ["SCRIPT", "FUNCTION", "CONFIG", "CLIENT", "CLUSTER"].contains(&first.as_str()) {
        name = format!("{first} {}", text(1).to_uppercase());
    }
    let verb = match first.as_str() {
        "FCALL" => text(1).rsplit('_').next().unwrap_or_default().to_owned(),
        "EVALSHA" | "EVAL" => text(4),
        _ => String::new(),
    };
    let script = (name.ends_with(" LOAD")).then(|| words.last().cloned().unwrap_or_default());
    Command { name, verb, script, answered: false, answer: String::new() }
}

/// The words of a command.
fn words(frame: &[u8]) -> Vec<Vec<u8>> {
    let mut words = vec![];
    let Some(mut at) = line(frame).map(|(_, end)| end).filter(|_| frame[0] == b'*') else { return words };
    while at < frame.len() {
        let Some((head, end)) = line(&frame[at..]) else { break };
        if head.first() != Some(&b'$') {
            break;
        }
        let length: usize = std::str::from_utf8(&head[1..]).ok().and_then(|n| n.parse().ok()).unwrap_or(0);
        let Some(word) = frame.get(at + end..at + end + length) else { break };
        words.push(word.to_vec());
        at += end + length + 2;
    }
    words
}

/// A line without its end, and where the next begins.
fn line(bytes: &[u8]) -> Option<(&[u8], usize)> {
    let end = bytes.windows(2).position(|pair| pair == b"\r\n")?;
    Some((&bytes[..end], end + 2))
}

/// How long the first frame is; `None`: it is not there yet.
pub fn frame(bytes: &[u8]) -> Option<usize> {
    let (head, mut at) = line(bytes)?;
    let kind = *head.first()?;
    let count: i64 = std::str::from_utf8(&head[1..]).ok().and_then(|n| n.parse().ok()).unwrap_or(-1);
    let parts = match kind {
        b'$' | b'!' | b'=' => {
            let length = usize::try_from(count).ok().map_or(0, |length| length + 2);
            return (bytes.len() >= at + length).then_some(at + length);
        }
        b'*' | b'~' | b'>' => count,
        b'%' => count * 2,
        // What is said of the frame behind it comes first.
        b'|' => count * 2 + 1,
        _ => 0,
    };
    for _ in 0..parts {
        at += frame(&bytes[at..])?;
    }
    Some(at)
}
