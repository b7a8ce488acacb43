//! Refusals as the API shows them: a closed list of codes, each with its status and type, and the error object.
//!
//! The table is the one of `docs/api.md`, section "Errors". Messages are for the person who wrote the request:
//! they name what was sent and what is expected, never paths, keys or types of this program.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};

use crate::engine::{JobError, SubmitError};

/// What went wrong, in one word. Status and type follow from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Code {
    /// The body is not one JSON object.
    InvalidJson,
    /// A required field is absent.
    MissingParameter,
    /// A field has the wrong JSON type.
    InvalidType,
    /// A field has a value outside what is allowed.
    InvalidValue,
    /// A field is not known, and unknown fields are refused.
    UnknownParameter,
    /// A field asks for something this server does not do.
    UnsupportedParameter,
    /// A field is known, but not with this value.
    UnsupportedValue,
    /// A content part that is not text.
    UnsupportedContent,
    /// Tool results that answer no call.
    InvalidToolHistory,
    /// The prompt does not fit the context.
    ContextLength,
    /// No API key, or a wrong one.
    InvalidApiKey,
    /// A route that is switched off on purpose.
    FeatureDisabled,
    /// A `Host` that does not belong to this server.
    OriginNotAllowed,
    /// No such route.
    NotFound,
    /// No such model.
    ModelNotFound,
    /// No stream of that conversation.
    StreamNotFound,
    /// The bytes asked for are not kept any more.
    StreamOffsetLost,
    /// The route exists, but not for this method.
    MethodNotAllowed,
    /// The body is larger than allowed.
    TooLarge,
    /// A page sent something else than JSON.
    UnsupportedMediaType,
    /// The body did not arrive in time.
    RequestTimeout,
    /// The output cannot go on in its grammar.
    GrammarFailed,
    /// A block did not settle within its step limit.
    NotConverged,
    /// Too many requests wait already.
    QueueFull,
    /// A bug.
    Internal,
    /// A feature of other servers that this one does not have.
    NotSupported,
    /// The model is still being loaded.
    ModelLoading,
    /// The server is shutting down.
    Draining,
    /// No room in the cache, or no idle slot.
    Capacity,
    /// No slot became free in time.
    QueueTimeout,
    /// The inference worker has stopped.
    WorkerFailed,
}

impl Code {
    /// Status, `error.type` and `error.code`.
    fn row(self) -> (StatusCode, &'static str, &'static str) {
        const REQUEST: &str = "invalid_request_error";
        const UNAVAILABLE: &str = "unavailable_error";
        match self {
            Self::InvalidJson => (StatusCode::BAD_REQUEST, REQUEST, "invalid_json"),
            Self::MissingParameter => (StatusCode::BAD_REQUEST, REQUEST, "missing_required_parameter"),
            Self::InvalidType => (StatusCode::BAD_REQUEST, REQUEST, "invalid_type"),
            Self::InvalidValue => (StatusCode::BAD_REQUEST, REQUEST, "invalid_value"),
            Self::UnknownParameter => (StatusCode::BAD_REQUEST, REQUEST, "unknown_parameter"),
            Self::UnsupportedParameter => (StatusCode::BAD_REQUEST, REQUEST, "unsupported_parameter"),
            Self::UnsupportedValue => (StatusCode::BAD_REQUEST, REQUEST, "unsupported_value"),
            Self::UnsupportedContent => (StatusCode::BAD_REQUEST, REQUEST, "unsupported_content"),
            Self::InvalidToolHistory => (StatusCode::BAD_REQUEST, REQUEST, "invalid_tool_history"),
            Self::ContextLength => (StatusCode::BAD_REQUEST, "exceed_context_size_error", "context_length_exceeded"),
            Self::InvalidApiKey => (StatusCode::UNAUTHORIZED, "authentication_error", "invalid_api_key"),
            Self::FeatureDisabled => (StatusCode::FORBIDDEN, "feature_disabled", "feature_disabled"),
            Self::OriginNotAllowed => (StatusCode::FORBIDDEN, "permission_error", "origin_not_allowed"),
            Self::NotFound => (StatusCode::NOT_FOUND, "not_found_error", "not_found"),
            Self::ModelNotFound => (StatusCode::NOT_FOUND, REQUEST, "model_not_found"),
            Self::StreamNotFound => (StatusCode::NOT_FOUND, "not_found_error", "stream_not_found"),
            Self::StreamOffsetLost => (StatusCode::BAD_REQUEST, REQUEST, "stream_offset_lost"),
            Self::MethodNotAllowed => (StatusCode::METHOD_NOT_ALLOWED, REQUEST, "method_not_allowed"),
            Self::TooLarge => (StatusCode::PAYLOAD_TOO_LARGE, REQUEST, "request_too_large"),
            Self::UnsupportedMediaType => (StatusCode::UNSUPPORTED_MEDIA_TYPE, REQUEST, "unsupported_media_type"),
            Self::RequestTimeout => (StatusCode::REQUEST_TIMEOUT, REQUEST, "request_timeout"),
            Self::GrammarFailed => (StatusCode::UNPROCESSABLE_ENTITY, "unprocessable_error", "grammar_failed"),
            Self::NotConverged => (StatusCode::UNPROCESSABLE_ENTITY, "unprocessable_error", "not_converged"),
            Self::QueueFull => (StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", "queue_full"),
            Self::Internal => (StatusCode::INTERNAL_SERVER_ERROR, "server_error", "internal_error"),
            Self::NotSupported => (StatusCode::NOT_IMPLEMENTED, "not_supported_error", "not_supported"),
            Self::ModelLoading => (StatusCode::SERVICE_UNAVAILABLE, UNAVAILABLE, "model_loading"),
            Self::Draining => (StatusCode::SERVICE_UNAVAILABLE, UNAVAILABLE, "draining"),
            Self::Capacity => (StatusCode::SERVICE_UNAVAILABLE, UNAVAILABLE, "capacity"),
            Self::QueueTimeout => (StatusCode::SERVICE_UNAVAILABLE, UNAVAILABLE, "queue_timeout"),
            Self::WorkerFailed => (StatusCode::SERVICE_UNAVAILABLE, UNAVAILABLE, "worker_failed"),
        }
    }

    /// Seconds after which trying again makes sense, where waiting helps.
    fn retry_after(self) -> Option<&'static str> {
        match self {
            Self::QueueFull | Self::ModelLoading | Self::Capacity | Self::QueueTimeout => Some("1"),
            Self::Draining => Some("5"),
            _ => None,
        }
    }

    /// Whether the connection should not be used again: its body was not read, or this process is about to end.
    fn closes(self) -> bool {
        matches!(self, Self::TooLarge | Self::RequestTimeout | Self::Draining)
    }
}

/// A refusal on its way to the client. Boxed, since every result that may hold one is as large as it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ApiError(Box<Refusal>);

#[derive(Clone, Debug, PartialEq)]
struct Refusal {
    code: Code,
    message: String,
    param: Option<String>,
    extra: Map<String, Value>,
}

impl ApiError {
    /// A refusal that no single field is to blame for.
    pub(crate) fn new(code: Code, message: impl Into<String>) -> Self {
        Self(Box::new(Refusal { code, message: message.into(), param: None, extra: Map::new() }))
    }

    /// Names the field at fault, as a path such as `messages[2].role`.
    #[must_use]
    pub(crate) fn at(mut self, param: impl Into<String>) -> Self {
        self.0.param = Some(param.into());
        self
    }

    /// Adds a member to the error object.
    #[must_use]
    pub(crate) fn with(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.0.extra.insert(name.to_owned(), value.into());
        self
    }

    /// A bug; what it was is in the log only.
    pub(crate) fn internal() -> Self {
        Self::new(Code::Internal, "internal error; the log has more under this request's x-request-id")
    }

    /// What went wrong, in one word.
    #[cfg(test)]
    pub(crate) fn code(&self) -> Code {
        self.0.code
    }

    /// What went wrong, for a person.
    pub(crate) fn message(&self) -> &str {
        &self.0.message
    }

    /// The field at fault.
    pub(crate) fn param(&self) -> Option<&str> {
        self.0.param.as_deref()
    }

    /// The status this is answered with.
    pub(crate) fn status(&self) -> StatusCode {
        self.0.code.row().0
    }

    /// `{"error":{...}}`
    pub(crate) fn body(&self) -> Value {
        let (_, kind, code) = self.0.code.row();
        let mut error = json!({"message": self.0.message, "type": kind, "param": self.0.param, "code": code});
        if let Value::Object(members) = &mut error {
            members.extend(self.0.extra.clone());
        }
        json!({ "error": error })
    }
}

/// The answer carries the refusal itself in its extensions, for dialects that write it in another form.
impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status(), Json(self.body())).into_response();
        let headers = response.headers_mut();
        if let Some(seconds) = self.0.code.retry_after() {
            headers.insert(header::RETRY_AFTER, HeaderValue::from_static(seconds));
        }
        if self.0.code == Code::InvalidApiKey {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if self.0.code.closes() {
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        response.extensions_mut().insert(self);
        response
    }
}

impl From<SubmitError> for ApiError {
    fn from(error: SubmitError) -> Self {
        let code = match error {
            SubmitError::QueueFull { .. } => Code::QueueFull,
            SubmitError::Loading => Code::ModelLoading,
            SubmitError::Draining => Code::Draining,
            SubmitError::WorkerFailed => Code::WorkerFailed,
        };
        Self::new(code, error.to_string())
    }
}

impl From<JobError> for ApiError {
    fn from(error: JobError) -> Self {
        let code = match &error {
            JobError::NotConverged { .. } => Code::NotConverged,
            JobError::Grammar(_) => Code::GrammarFailed,
            JobError::Capacity { .. } => Code::Capacity,
            JobError::QueueTimeout { .. } => Code::QueueTimeout,
            JobError::Draining | JobError::Cancelled => Code::Draining,
            JobError::Invalid(_) => return Self::internal(),
            // What the model said may name files and devices, so it stays in the log.
            JobError::Model(_) => return Self::new(Code::WorkerFailed, "the inference worker has stopped"),
        };
        Self::new(code, error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_object_always_has_its_four_members() {
        let plain = ApiError::new(Code::NotFound, "no such route").body();
        assert_eq!(
            plain,
            json!({"error": {"message": "no such route", "type": "not_found_error", "param": null, "code": "not_found"}})
        );
        let full = ApiError::new(Code::ContextLength, "m").at("messages").with("n_ctx", 64).body();
        assert_eq!(full["error"]["param"], "messages");
        assert_eq!(full["error"]["n_ctx"], 64);
    }

    #[test]
    fn waiting_is_suggested_where_it_helps() {
        let error: ApiError = SubmitError::QueueFull { queued: 8, capacity: 8 }.into();
        let response = error.into_response();
        assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(response.headers()[header::RETRY_AFTER], "1");
        let response = ApiError::new(Code::InvalidValue, "no").into_response();
        assert!(!response.headers().contains_key(header::RETRY_AFTER));
    }

    #[test]
    fn a_model_failure_does_not_show_its_text() {
        let error: ApiError = JobError::Model("/secret/path: bad".to_owned()).into();
        assert!(!error.body().to_string().contains("secret"));
    }
}
