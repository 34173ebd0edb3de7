// The shared_ptr of GCC 11 and newer reads this variable of glibc 2.32. Without a definition here, a library that is
// built on a new Linux distribution does not load on older ones.

// 0: the process may have several threads, so the reference counts of tensors are atomic.
extern "C" char __libc_single_threaded;
char __libc_single_threaded = 0;
