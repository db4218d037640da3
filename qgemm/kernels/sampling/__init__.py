"""The choice of a batch's next tokens from their scores, and what a decoding loop records of it."""
