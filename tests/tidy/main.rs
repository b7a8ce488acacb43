//! Tests of this area; see the modules.
