/* A host that lacks what LACKING names: pidfd_open flock fsync link chmod. Each fails as it does on such hosts. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static int lacks(const char *name, int error) {
    const char *names = getenv("LACKING");
    if (!names || !strstr(names, name)) return 0;
    errno = error;
    return 1;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

long syscall(long number, ...) {
    va_list list;
    long a[6];
    va_start(list, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(list, long);
    va_end(list);
    /* Kernels before 5.3; a strict container says EPERM. */
    if (number == SYS_pidfd_open && (lacks("pidfd_open", ENOSYS) || lacks("pidfd_denied", EPERM))) return -1;
    return REAL(syscall)(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

int flock(int fd, int how) {  /* NFS without a lock daemon */
    if (lacks("flock_lock", ENOLCK) || lacks("flock_none", EOPNOTSUPP)) return -1;
    return REAL(flock)(fd, how);
}
int fsync(int fd) { return lacks("fsync", EINVAL) ? -1 : REAL(fsync)(fd); }
int link(const char *a, const char *b) { return lacks("link", EPERM) ? -1 : REAL(link)(a, b); }
int linkat(int f, const char *a, int t, const char *b, int flags) {
    return lacks("link", EPERM) ? -1 : REAL(linkat)(f, a, t, b, flags);
}
int chmod(const char *path, mode_t mode) { return lacks("chmod", EPERM) ? -1 : REAL(chmod)(path, mode); }
int fchmodat(int f, const char *path, mode_t mode, int flags) {
    return lacks("chmod", EPERM) ? -1 : REAL(fchmodat)(f, path, mode, flags);
}
