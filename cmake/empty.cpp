// A floor without sources yet is still a library.
