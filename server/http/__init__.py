"""HTTP on one connection: reading requests from bytes, writing answers, and noticing clients that leave."""
