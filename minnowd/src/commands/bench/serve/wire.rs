//! As much of an HTTP client as the measurement needs: one request after another on a connection, events as they come.

use std::io::{self, BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream};

/// A connection that is kept open between requests.
pub(super) struct Connection {
    address: SocketAddr,
    stream: Option<BufReader<TcpStream>>,
}

impl Connection {
    pub(super) fn new(address: SocketAddr) -> Self {
        Self { address, stream: None }
    }

    /// Posts JSON and hands each `data:` line of the answer to `take`. Gives the status.
    pub(super) fn post(&mut self, path: &str, body: &str, take: &mut dyn FnMut(&str)) -> io::Result<u16> {
        let mut stream = match self.stream.take() {
            Some(stream) => stream,
            None => {
                let stream = TcpStream::connect(self.address)?;
                stream.set_nodelay(true)?;
                BufReader::new(stream)
            }
        };
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            self.address,
            body.len()
        );
        stream.get_mut().write_all(&[head.as_bytes(), body.as_bytes()].concat())?;
        let status = read_answer(&mut stream, take)?;
        self.stream = Some(stream);
        Ok(status)
    }
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}

fn line(stream: &mut impl BufRead) -> io::Result<String> {
    let mut line = String::new();
    if stream.read_line(&mut line)? == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(line.trim_end().to_owned())
}

fn read_answer(stream: &mut impl BufRead, take: &mut dyn FnMut(&str)) -> io::Result<u16> {
    let status = line(stream)?;
    let status = status.split(' ').nth(1).and_then(|code| code.parse().ok()).ok_or_else(|| invalid("no status"))?;
    let mut length = None;
    loop {
        let header = line(stream)?.to_ascii_lowercase();
        if header.is_empty() {
            break;
        }
        if let Some(value) = header.strip_prefix("content-length:") {
            length = Some(value.trim().parse().map_err(|_| invalid("no length"))?);
        }
    }
    let mut events = Events { rest: Vec::new() };
    if let Some(length) = length {
        let mut body = vec![0; length];
        stream.read_exact(&mut body)?;
        events.push(&body, take);
        return Ok(status);
    }
    loop {
        let size = usize::from_str_radix(&line(stream)?, 16).map_err(|_| invalid("no chunk size"))?;
        let mut chunk = vec![0; size + 2];
        stream.read_exact(&mut chunk)?;
        if size == 0 {
            return Ok(status);
        }
        events.push(&chunk[..size], take);
    }
}

/// Lines of an event stream, whatever the cut into chunks.
struct Events {
    rest: Vec<u8>,
}

impl Events {
    fn push(&mut self, bytes: &[u8], take: &mut dyn FnMut(&str)) {
        self.rest.extend_from_slice(bytes);
        while let Some(end) = self.rest.iter().position(|&byte| byte == b'\n') {
            let line: Vec<u8> = self.rest.drain(..=end).collect();
            if let Some(data) = std::str::from_utf8(&line).ok().and_then(|line| line.strip_prefix("data: ")) {
                take(data.trim_end());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_read_by_length_and_by_chunks() {
        let chunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\ndata: {\"a\r\nc\r\n\":1}\n\ndata: \r\n8\r\n[DONE]\n\n\r\n0\r\n\r\nrest";
        let mut events = Vec::new();
        let mut stream = chunked.as_bytes();
        assert_eq!(read_answer(&mut stream, &mut |data| events.push(data.to_owned())).unwrap(), 200);
        assert_eq!(events, ["{\"a\":1}", "[DONE]"]);
        assert_eq!(stream, b"rest");
        let mut whole = "HTTP/1.1 429 Too Many\r\ncontent-length: 2\r\n\r\n{}HTTP".as_bytes();
        assert_eq!(read_answer(&mut whole, &mut |_| panic!("no events")).unwrap(), 429);
        assert_eq!(whole, b"HTTP");
        assert!(read_answer(&mut "HTTP/1.1 200".as_bytes(), &mut |_| ()).is_err());
    }
}
