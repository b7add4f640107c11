//! An upstream that says something before its answers.

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use super::tls::whole_answer;

/// What may come before an answer (RFC 9110 section 15.2).
pub const INTERIM: &[u8] = b"HTTP/1.1 103 Early Hints\r\nlink: <a>\r\n\r\n";

/// Answers whatever it is asked with `before` and a whole completion. `once`: on each connection; then it says no more than
/// `before`, and closes.
pub async fn answer_each(listener: TcpListener, before: &'static [u8], once: bool) {
    while let Ok((mut stream, _)) = listener.accept().await {
        tokio::spawn(async move {
            let answer = whole_answer();
            let mut count = 0;
            while stream.read(&mut [0; 1 << 16]).await.is_ok_and(|read| read > 0) {
                count += 1;
                stream.write_all(before).await.unwrap();
                if once && count > 1 {
                    return;
                }
                stream.write_all(answer.as_bytes()).await.unwrap();
            }
        });
    }
}
