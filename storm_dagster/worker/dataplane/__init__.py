"""Routes, tuple trees, frames and links between workers."""
