//! Conversions end to end: golden bytes, and what holds whatever the number of workers.

mod conversions;
