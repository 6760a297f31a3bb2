"""What a run tells of itself in numbers and words: records that training writes and reports read, never torch."""
