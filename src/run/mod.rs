//! The loop. The only room that reads the clock or starts processes.
