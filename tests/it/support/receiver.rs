//! Whoever is told: a server that writes down what it is sent, and answers as it is scripted to.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, Uri};
use tokio::task::block_in_place;

/// How long anything may take before a test gives up on it.
const PATIENCE: Duration = Duration::from_secs(40);

/// A running receiver. A test that uses it needs a runtime with several threads.
pub struct Receiver {
    pub address: SocketAddr,
    seen: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    posts: Mutex<Book>,
    grown: Condvar,
}

#[derive(Default)]
struct Book {
    posts: Vec<Post>,
    /// What paths that contain a text are answered next, instead of 200. 0 for never.
    script: HashMap<String, Vec<u16>>,
}

/// What it was sent.
#[derive(Clone, Debug)]
pub struct Post {
    pub path: String,
    pub headers: HashMap<String, String>,
    pub body: String,
    /// What it answered.
    pub status: u16,
}

impl Post {
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{}: {error}", self.body))
    }
}

impl Receiver {
    pub async fn start() -> Self {
        Self::start_at(([127, 0, 0, 1], 0).into()).await
    }

    /// At an address that has refused everybody until now.
    pub async fn start_at(address: SocketAddr) -> Self {
        let seen = Arc::new(Shared::default());
        let listener = tokio::net::TcpListener::bind(address).await.expect("a free port");
        let address = listener.local_addr().expect("an address");
        let router = Router::new().fallback(take).with_state(Arc::clone(&seen));
        tokio::task::spawn(async move { axum::serve(listener, router).await });
        Self { address, seen }
    }

    /// Answers paths that contain `part` with these, one after the other; 0 hangs.
    pub fn answer(&self, part: &str, statuses: &[u16]) {
        let mut state = self.seen.posts.lock().expect("the posts");
        state.script.insert(part.to_owned(), statuses.to_vec());
    }

    /// Everything so far.
    pub fn posts(&self) -> Vec<Post> {
        self.seen.posts.lock().expect("the posts").posts.clone()
    }

    /// Waits until what it was sent will do, and answers that.
    pub fn wait_for<T>(&self, what: &str, mut will_do: impl FnMut(&[Post]) -> Option<T>) -> T {
        block_in_place(|| {
            let mut found = None;
            let state = self.seen.posts.lock().expect("the posts");
            let lacks = |state: &mut Book| {
                found = will_do(&state.posts);
                found.is_none()
            };
            let (state, waited) =
                self.seen.grown.wait_timeout_while(state, PATIENCE, lacks).expect("the posts");
            assert!(!waited.timed_out(), "{what} never came: {:#?}", state.posts);
            found.expect("it was found")
        })
    }

    /// The notifications of one kind that were taken.
    pub fn notifications(posts: &[Post], kind: &str) -> Vec<serde_json::Value> {
        let taken = posts.iter().filter(|post| post.status == 200 && post.body.starts_with('{'));
        taken.map(Post::json).filter(|json| json["kind"] == kind).collect()
    }
}

async fn take(State(seen): State<Arc<Shared>>, uri: Uri, headers: HeaderMap, body: Bytes) -> StatusCode {
    let status = {
        let mut state = seen.posts.lock().expect("the posts");
        let script =
            state.script.iter_mut().find(|(part, left)| uri.path().contains(*part) && !left.is_empty());
        let status = script.map_or(200, |(_, left)| left.remove(0));
        let header = |value: &http::HeaderValue| value.to_str().unwrap_or_default().to_owned();
        state.posts.push(Post {
            path: uri.path().to_owned(),
            headers: headers.iter().map(|(name, value)| (name.to_string(), header(value))).collect(),
            body: String::from_utf8_lossy(&body).into_owned(),
            status,
        });
        seen.grown.notify_all();
        status
    };
    if status == 0 {
        std::future::pending::<()>().await;
    }
    StatusCode::from_u16(status).expect("a status")
}
