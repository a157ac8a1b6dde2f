"""What a text request may ask for besides plain answers: adapters, beams, embeddings."""
