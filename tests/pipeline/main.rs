//! Conversions end to end: golden bytes, and what holds whatever the number of workers, the way of reading, kills and
//! faults.

mod conversions;
mod faults;
mod resume;
