//! How a running gateway hands over to a new process, on SIGQUIT, without a moment in which nobody listens.
//!
//! The new process (`serve --upgrade`) starts as any does, but for the lock that the old one has, and then waits
//! at `upgrade.sock` in the data folder. On SIGQUIT the old one connects and they talk:
//!
//! 1. old: its listening sockets and its lock, as open files, so that neither is free for a moment;
//! 2. new: `ready`, or why not. Until here the old one serves on as if nothing had been;
//! 3. old: stops accepting (callers wait in the kernel's queue), lingers for requests on their way, gives all
//!    free money back in one transaction (docs/model-check.md), and says `done` with how limits stand;
//! 4. new: leases what is free and accepts. The old one finishes its streams and leaves; until then it says how
//!    many of its calls still run, since they count against limits of calls at once.
//!
//! Deliberately absent: a way back after 3. The new process has started by then and only has to lease; should
//! it die all the same, the old one finishes its calls and leaves, and whoever is started next replays and
//! serves. Should the old one die, the new one goes on: it has sockets and lock, and books what the other left.

use std::fs::File;
use std::io::{self, BufRead as _, BufReader, IoSlice, IoSliceMut, Write as _};
use std::mem::MaybeUninit;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context as _;
use filters::ids::AccountId;
use filters::purse::Carried;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use serde::{Deserialize, Serialize};

use crate::boot;
use crate::config::checked::{Listen, Listener};

/// Sockets and the lock, at most.
const FILES_MAX: usize = 32;
/// The first message, at most, in bytes.
const OFFER_BYTES_MAX: usize = 16 << 10;
/// How long the other side may take for an answer.
const PATIENCE: Duration = Duration::from_secs(30);
/// How often an heir looks whether somebody is at the door, or the folder is free.
const LOOK: Duration = Duration::from_millis(50);

/// How many looks the sockets of a process that has just left may take to be free: five seconds.
const CLOSING_LOOKS: u32 = 100;

/// How accounts' limits stand.
pub type Limits = Vec<(AccountId, Carried)>;

/// Listening sockets by their address: bound here, or handed over.
#[derive(Debug, Default)]
pub struct Sockets {
    open: Vec<(SocketAddr, TcpListener)>,
    /// How often one that is still taken is tried again.
    tries: u32,
}

impl Sockets {
    /// The socket of an address; bound now where none was handed over.
    ///
    /// # Errors
    /// When it cannot be bound; `field` says in the message whose it is.
    pub fn get(&mut self, field: &str, address: SocketAddr) -> anyhow::Result<TcpListener> {
        if !self.open.iter().any(|(known, _)| *known == address) {
            let bound = bind(address, self.tries, || std::thread::sleep(LOOK))
                .with_context(|| format!("cannot bind {field} {address}"))?;
            // They are polled.
            bound.set_nonblocking(true)?;
            self.open.push((address, bound));
        }
        let found = self.open.iter().find(|(known, _)| *known == address).context("a socket got lost")?;
        Ok(found.1.try_clone()?)
    }

    /// The sockets of all listeners of callers. Those that were handed over and are not wanted any more are
    /// closed: nobody would accept on them.
    ///
    /// # Errors
    /// When one cannot be bound.
    pub fn open(&mut self, listen: &Listen) -> anyhow::Result<Vec<TcpListener>> {
        let wanted = |address: SocketAddr| {
            address == listen.admin || listen.callers.iter().any(|listener| listener.address == address)
        };
        self.open.retain(|(address, _)| wanted(*address));
        let open = |listener: &Listener| self.get(listener.field, listener.address);
        listen.callers.iter().map(open).collect()
    }
}

fn bind(address: SocketAddr, tries: u32, mut pause: impl FnMut()) -> io::Result<TcpListener> {
    let mut left = tries;
    loop {
        match TcpListener::bind(address) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && left > 0 => left -= 1,
            bound => return bound,
        }
        pause();
    }
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Message {
    /// With as many files, and the lock in front of them.
    Offer(Vec<SocketAddr>),
    Ready,
    Done(Limits),
    Running(Limits),
}

/// A line to the other process.
#[derive(Debug)]
pub struct Line {
    stream: UnixStream,
    reader: BufReader<UnixStream>,
}

impl Line {
    fn new(stream: UnixStream) -> io::Result<Self> {
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let reader = BufReader::new(stream.try_clone()?);
        Ok(Self { stream, reader })
    }

    fn say(&mut self, message: &Message) -> anyhow::Result<()> {
        let mut line = serde_json::to_vec(message)?;
        line.push(b'\n');
        Ok(self.stream.write_all(&line)?)
    }

    fn hear(&mut self) -> anyhow::Result<Message> {
        let mut line = String::new();
        let bytes = self.reader.read_line(&mut line).context("the other process does not answer")?;
        anyhow::ensure!(bytes > 0, "the other process has gone");
        Ok(serde_json::from_str(&line)?)
    }
}

/// What the old process needs to hand over.
#[derive(Debug)]
pub struct Estate {
    data: PathBuf,
    files: Mutex<Option<(File, Sockets)>>,
    heir: Mutex<Option<Line>>,
}

impl Estate {
    /// Of the process that owns the folder.
    #[must_use]
    pub fn new(data: &Path, owner: File, sockets: Sockets) -> Self {
        Self { data: data.to_owned(), files: Mutex::new(Some((owner, sockets))), heir: Mutex::default() }
    }

    /// Offers everything to the process that waits for it; blocks until it is ready.
    ///
    /// # Errors
    /// When nobody waits, or it cannot take over: everything stays as it is.
    pub fn offer(&self) -> anyhow::Result<()> {
        let door = door(&self.data);
        let stream = UnixStream::connect(&door).with_context(|| {
            format!("nobody waits at {}: start a process with `serve --upgrade`", door.display())
        })?;
        let files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        let (owner, sockets) = files.as_ref().context("everything is handed over already")?;
        let mut line = Line::new(stream)?;
        send_offer(&line.stream, owner, sockets)?;
        match line.hear()? {
            Message::Ready => {}
            other => anyhow::bail!("the new process said {other:?}"),
        }
        drop(files);
        *self.heir.lock().unwrap_or_else(PoisonError::into_inner) = Some(line);
        Ok(())
    }

    /// Closes our sockets, and our hold on the folder where somebody else has it now. Answers who does.
    pub fn let_go(&self) -> Option<Line> {
        let heir = self.heir.lock().unwrap_or_else(PoisonError::into_inner).take();
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        let (owner, _sockets) = files.take().unzip();
        if heir.is_none() {
            // The lock stays until the process has left.
            *files = owner.map(|owner| (owner, Sockets::default()));
        }
        heir
    }
}

impl Line {
    /// The money is given back.
    ///
    /// # Errors
    /// When the new process has gone.
    pub fn done(&mut self, limits: Limits) -> anyhow::Result<()> {
        self.say(&Message::Done(limits))
    }

    /// How many calls still run here.
    ///
    /// # Errors
    /// When the new process has gone.
    pub fn running(&mut self, limits: Limits) -> anyhow::Result<()> {
        self.say(&Message::Running(limits))
    }

    /// We could take over now.
    ///
    /// # Errors
    /// When the old process has gone.
    pub fn ready(&mut self) -> anyhow::Result<()> {
        self.say(&Message::Ready)
    }

    /// How limits stand, once the money is given back; later, how many calls still run over there.
    ///
    /// # Errors
    /// When the old process has gone, or is silent for too long.
    pub fn news(&mut self) -> anyhow::Result<Limits> {
        match self.hear()? {
            Message::Done(limits) | Message::Running(limits) => Ok(limits),
            other @ (Message::Offer(_) | Message::Ready) => anyhow::bail!("the old process said {other:?}"),
        }
    }
}

/// What an heir came into.
#[derive(Debug)]
pub struct Inheritance {
    pub owner: File,
    pub sockets: Sockets,
    /// To whoever had it before; `None`: it had left.
    pub line: Option<Line>,
}

/// Waits until the process that serves from `data` offers to hand over, or leaves.
///
/// # Errors
/// When nobody could offer anything, or the offer is broken.
pub fn wait(data: &Path) -> anyhow::Result<Inheritance> {
    let path = door(data);
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(error).with_context(|| format!("cannot remove {}", path.display()));
        }
        _ => {}
    }
    let listener =
        UnixListener::bind(&path).with_context(|| format!("cannot listen at {}", path.display()))?;
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?;
    listener.set_nonblocking(true)?;
    let pid = std::fs::read_to_string(data.join("owner.lock")).unwrap_or_default();
    tracing::info!(old = pid.trim(), "ready to take over: send SIGQUIT to the process that serves");
    let inheritance = loop {
        match listener.accept() {
            Ok((stream, _)) => match take_offer(stream) {
                Ok(inheritance) => break inheritance,
                // It serves on and may come again.
                Err(error) => tracing::warn!("an offer came to nothing: {error:#}"),
            },
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error).context("nobody can come in at upgrade.sock"),
        }
        if let Some(owner) = boot::own(data)? {
            tracing::info!("the process that served has left by itself");
            // Its lock goes a little before its sockets: they are closed when the process is gone.
            let sockets = Sockets { open: vec![], tries: CLOSING_LOOKS };
            break Inheritance { owner, sockets, line: None };
        }
        std::thread::sleep(LOOK);
    };
    std::fs::remove_file(&path)?;
    Ok(inheritance)
}

/// Starts the binary that is there by now, with our own arguments, to take over from us. As our child it belongs
/// to the same service of a service manager, which otherwise would not have it.
///
/// # Errors
/// When it cannot be started.
pub fn start_heir() -> anyhow::Result<()> {
    let mut args = std::env::args_os();
    let program = args.next().context("we do not know what we were started as")?;
    let mut heir = Command::new(&program);
    heir.args(args.filter(|arg| arg != "--upgrade")).arg("--upgrade");
    let mut heir = heir.spawn().with_context(|| format!("cannot start {}", program.display()))?;
    tracing::info!(pid = heir.id(), "a process is started that will wait to take over");
    let wait = move || {
        if let Ok(status) = heir.wait() {
            tracing::warn!(%status, "the process that was to take over has ended");
        }
    };
    std::thread::Builder::new().name("heir".to_owned()).spawn(wait)?;
    Ok(())
}

fn door(data: &Path) -> PathBuf {
    data.join("upgrade.sock")
}

fn send_offer(stream: &UnixStream, owner: &File, sockets: &Sockets) -> anyhow::Result<()> {
    let addresses = sockets.open.iter().map(|(address, _)| *address).collect();
    let mut line = serde_json::to_vec(&Message::Offer(addresses))?;
    line.push(b'\n');
    let mut files: Vec<BorrowedFd<'_>> = vec![owner.as_fd()];
    files.extend(sockets.open.iter().map(|(_, socket)| socket.as_fd()));
    anyhow::ensure!(
        files.len() <= FILES_MAX && line.len() <= OFFER_BYTES_MAX,
        "too many sockets to hand over"
    );
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    anyhow::ensure!(control.push(SendAncillaryMessage::ScmRights(&files)), "too many sockets to hand over");
    let sent = rustix::net::sendmsg(stream, &[IoSlice::new(&line)], &mut control, SendFlags::NOSIGNAL)?;
    anyhow::ensure!(sent == line.len(), "the offer was cut short");
    Ok(())
}

fn take_offer(stream: UnixStream) -> anyhow::Result<Inheritance> {
    let line = Line::new(stream)?;
    let mut bytes = vec![0; OFFER_BYTES_MAX];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = rustix::net::recvmsg(
        &line.stream,
        &mut [IoSliceMut::new(&mut bytes)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    let files: Vec<OwnedFd> = control
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(files) => Some(files),
            _ => None,
        })
        .flatten()
        .collect();
    let Message::Offer(addresses) = serde_json::from_slice(bytes.get(..received.bytes).unwrap_or_default())?
    else {
        anyhow::bail!("it is none");
    };
    anyhow::ensure!(
        files.len() == addresses.len() + 1,
        "{} files for {} sockets",
        files.len(),
        addresses.len()
    );
    let mut files = files.into_iter();
    let owner = File::from(files.next().context("no lock")?);
    let open = addresses.into_iter().zip(files.map(TcpListener::from)).collect();
    let sockets = Sockets { open, tries: 0 };
    Ok(Inheritance { owner, sockets, line: Some(line) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_that_is_about_to_be_closed_is_waited_for_and_no_longer_than_said() {
        let mut taken = Some(TcpListener::bind("127.0.0.1:0").unwrap());
        let address = taken.as_ref().unwrap().local_addr().unwrap();
        let mut pauses = 0;
        let refused = bind(address, 3, || pauses += 1).unwrap_err();
        assert_eq!((refused.kind(), pauses), (io::ErrorKind::AddrInUse, 3));
        let bound = bind(address, 3, || drop(taken.take())).unwrap();
        assert_eq!(bound.local_addr().unwrap(), address);
    }
}
