//! TLS on TCP listeners: a certificate and its key from PEM files, read again when told.
//!
//! Connections that are open keep what they began with. TLS 1.2 and 1.3, by `rustls` with `ring`.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use rustls::ServerConfig;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use crate::config::TlsFiles;

/// From the first byte of a connection to the end of its handshake.
const HANDSHAKE_MAX: Duration = Duration::from_secs(10);

/// Why a certificate cannot be used.
#[derive(Debug, Error)]
pub enum TlsError {
    /// A file cannot be read, or is no PEM of the right kind.
    #[error("{}: {}", path.display(), shown(error))]
    File {
        /// Which file.
        path: PathBuf,
        /// Why.
        error: pem::Error,
    },
    /// A file without a certificate.
    #[error("{}: no certificate in it", path.display())]
    NoCertificate {
        /// Which file.
        path: PathBuf,
    },
    /// The key is not the certificate's, or of a kind that is not known.
    #[error("{} and {}: {error}", files.certificate.display(), files.key.display())]
    Pair {
        /// Both files.
        files: TlsFiles,
        /// Why.
        error: rustls::Error,
    },
}

fn shown(error: &pem::Error) -> String {
    match error {
        pem::Error::Io(error) => error.to_string(),
        pem::Error::NoItemsFound => "no private key in it".to_owned(),
        other => other.to_string(),
    }
}

/// The certificate that new connections get. Cheap to clone; all clones see a change.
#[derive(Clone)]
pub struct Tls {
    files: TlsFiles,
    config: Arc<RwLock<Arc<ServerConfig>>>,
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls").field("files", &self.files).finish_non_exhaustive()
    }
}

impl Tls {
    /// Reads the files.
    ///
    /// # Errors
    /// If they are not a certificate and its key.
    pub fn read(files: TlsFiles) -> Result<Self, TlsError> {
        let config = read(&files)?;
        Ok(Self { files, config: Arc::new(RwLock::new(config)) })
    }

    /// Reads the files again, for connections to come.
    ///
    /// # Errors
    /// If they are not a certificate and its key; the old ones stay in use.
    pub fn read_again(&self) -> Result<(), TlsError> {
        let config = read(&self.files)?;
        *self.config.write().unwrap_or_else(PoisonError::into_inner) = config;
        Ok(())
    }

    /// Shakes hands with a client.
    pub(super) async fn accept<S: AsyncRead + AsyncWrite + Unpin>(&self, stream: S) -> io::Result<TlsStream<S>> {
        let config = Arc::clone(&self.config.read().unwrap_or_else(PoisonError::into_inner));
        let handshake = TlsAcceptor::from(config).accept(stream);
        tokio::time::timeout(HANDSHAKE_MAX, handshake).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
    }
}

fn read(files: &TlsFiles) -> Result<Arc<ServerConfig>, TlsError> {
    let failed = |path: &PathBuf| {
        let path = path.clone();
        move |error| TlsError::File { path, error }
    };
    let certificates = CertificateDer::pem_file_iter(&files.certificate).map_err(failed(&files.certificate))?;
    let certificates = certificates.collect::<Result<Vec<_>, _>>().map_err(failed(&files.certificate))?;
    if certificates.is_empty() {
        return Err(TlsError::NoCertificate { path: files.certificate.clone() });
    }
    let key = PrivateKeyDer::from_pem_file(&files.key).map_err(failed(&files.key))?;
    let pair = |error| TlsError::Pair { files: files.clone(), error };
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().map_err(pair)?;
    let mut config = builder.with_no_client_auth().with_single_cert(certificates, key).map_err(pair)?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}
