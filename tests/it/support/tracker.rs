//! An error tracker that keeps every byte that it is sent.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use serde_json::Value;

const PATIENCE: Duration = Duration::from_secs(30);

/// A receiver of envelopes on a free port. Ends with its process: nothing of it outlives a test that matters.
pub struct Receiver {
    address: SocketAddr,
    seen: Arc<(Mutex<Vec<String>>, Condvar)>,
}

/// What it does with an envelope.
#[derive(Clone, Copy)]
pub enum Manner {
    Answers,
    /// It takes the connection and says nothing.
    Hangs,
}

impl Receiver {
    pub fn start(manner: Manner) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("its address");
        let seen: Arc<(Mutex<Vec<String>>, Condvar)> = Arc::default();
        let sink = Arc::clone(&seen);
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let sink = Arc::clone(&sink);
                std::thread::spawn(move || serve(stream, manner, &sink));
            }
        });
        Self { address, seen }
    }

    /// Where events go.
    pub fn dsn(&self) -> String {
        format!("http://0123456789abcdef0123456789abcdef@{}/7", self.address)
    }

    /// The envelopes, heads of the requests included, once there are so many.
    pub fn wait_for(&self, count: usize) -> Vec<String> {
        let (seen, grown) = &*self.seen;
        let fewer = |seen: &mut Vec<String>| seen.len() < count;
        let seen = seen.lock().expect("what was seen");
        let (seen, waited) = grown.wait_timeout_while(seen, PATIENCE, fewer).expect("what was seen");
        assert!(!waited.timed_out(), "only {} of {count} came: {seen:#?}", seen.len());
        seen.clone()
    }

    pub fn seen(&self) -> Vec<String> {
        self.seen.0.lock().expect("what was seen").clone()
    }
}

/// The event in an envelope: the one line of it that is an object with an `exception`.
pub fn event(envelope: &str) -> Value {
    let events = envelope.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    events.into_iter().find(|line| line.get("exception").is_some()).unwrap_or_else(|| panic!("{envelope}"))
}

fn serve(stream: TcpStream, manner: Manner, seen: &(Mutex<Vec<String>>, Condvar)) {
    let mut answers = stream.try_clone().expect("a stream");
    let mut stream = BufReader::new(stream);
    loop {
        let mut head = String::new();
        let mut length = 0;
        loop {
            let mut line = String::new();
            if stream.read_line(&mut line).unwrap_or_default() == 0 {
                return;
            }
            if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                length = value.trim().parse().expect("a length");
            }
            head.push_str(&line);
            if line == "\r\n" {
                break;
            }
        }
        let mut body = vec![0; length];
        if stream.read_exact(&mut body).is_err() {
            return;
        }
        let (all, grown) = seen;
        all.lock().expect("what was seen").push(head + &String::from_utf8_lossy(&body));
        grown.notify_all();
        if matches!(manner, Manner::Answers)
            && answers.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}").is_err()
        {
            return;
        }
    }
}
