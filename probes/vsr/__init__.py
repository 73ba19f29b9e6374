"""VSR: the truth of statements about spatial relations in a picture."""
