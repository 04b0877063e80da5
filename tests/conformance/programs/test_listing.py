"""fi_info: which entries are listed, under which conditions, and when none may be."""

import os
import re
import socket
import unittest

from lib import programs, spaces

from . import common

ENODATA = 61


class Listing(unittest.TestCase):
    def fi_info(self, libfabric, *options, **env):
        return programs.run([libfabric.program("fi_info"), *options], libfabric.env(**env))

    @common.per_release
    def test_soft0_is_listed(self, libfabric):
        shown = self.fi_info(libfabric, "-p", "weft")
        self.assertEqual(shown.status, 0, shown)
        entries = common.infos(shown.out)
        self.assertTrue(entries, shown)
        # libfabric lists its own layers over weft too
        self.assertEqual({entry["provider"].split(";")[0] for entry in entries}, {"weft"}, shown)
        ours = [entry for entry in entries if entry["provider"] == "weft"]
        self.assertIn(("soft0", "FI_EP_MSG"), {(entry["domain"], entry["type"]) for entry in ours}, shown)
        major, minor = common.version(libfabric)
        self.assertTrue(entries[0]["version"], shown)
        self.assertGreaterEqual((major, minor), (1, 17))

    @common.per_release
    def test_the_device_is_described(self, libfabric):
        """fi_info.nic, as for a real device."""
        shown = self.fi_info(libfabric, "-p", "weft", "-d", "soft0", "-v")
        self.assertRegex(shown.out, r"(?s)nic:\s+fi_device_attr:\s+name: soft0\b", shown)
        self.assertIn("fi_link_attr:", shown.out, shown)

    @common.per_release
    def test_the_release_is_the_one_meant(self, libfabric):
        want = {"2.1": (2, 1), "2.5": (2, 5)}.get(libfabric.name)
        found = common.version(libfabric)
        self.assertIsNotNone(found)
        if want:
            self.assertEqual(found, want)

    @common.per_release
    def test_listed_among_all_without_being_asked_for(self, libfabric):
        shown = self.fi_info(libfabric)
        self.assertEqual(shown.status, 0, shown)
        self.assertIn("weft", {entry["provider"] for entry in common.infos(shown.out)}, shown)

    @common.per_release
    def test_soft0_comes_after_every_real_device(self, libfabric):
        entries = [entry for entry in common.infos(self.fi_info(libfabric, "-p", "weft").out) if entry["provider"] == "weft"]
        soft = [entry["domain"] == "soft0" for entry in entries]
        self.assertTrue(any(soft))
        self.assertEqual(soft, sorted(soft), entries)

    @common.per_release
    def test_this_hosts_addresses_are_answered(self, libfabric):
        for node, family in (("127.0.0.1", "sockaddr_in"), ("::1", "sockaddr_in6")):
            shown = self.fi_info(libfabric, "-p", "weft", "-n", node, "-v")
            self.assertEqual(shown.status, 0, shown)
            self.assertIn(f"fi_{family}://", shown.out, shown)

    @common.per_release
    def test_another_hosts_address_gives_enodata(self, libfabric):
        for node in ("192.0.2.1", "2001:db8::1"):
            shown = self.fi_info(libfabric, "-p", "weft", "-n", node)
            self.assertNotEqual(shown.status, 0, shown)
            self.assertRegex(shown.text, rf"fi_getinfo: -{ENODATA}\b", shown)

    @common.per_release
    def test_a_name_that_does_not_resolve_gives_enodata(self, libfabric):
        shown = self.fi_info(libfabric, "-p", "weft", "-n", "no-such-host.invalid")
        self.assertRegex(shown.text, rf"fi_getinfo: -{ENODATA}\b", shown)

    @common.per_release
    def test_what_is_not_offered_gives_enodata(self, libfabric):
        for options in (["-t", "FI_EP_DGRAM"], ["-d", "no-such-domain"], ["-f", "no-such-fabric"]):
            shown = self.fi_info(libfabric, "-p", "weft", *options)
            self.assertRegex(shown.text, rf"fi_getinfo: -{ENODATA}\b", shown)

    def sources(self, **env):
        shown = self.fi_info(programs.SYSTEM, "-p", "weft", "-d", "soft0", "-v", **env)
        return set(re.findall(r"src_addr: fi_sockaddr_\w+://(\S+):0", shown.out)), shown

    def test_only_addresses_of_the_named_interfaces_are_offered(self):
        local = {"127.0.0.1", "[::1]"}
        every, shown = self.sources()
        self.assertLessEqual(local, every, shown)
        self.assertEqual(self.sources(FI_WEFT_INTERFACE="no-such-if, lo")[0], local)
        others, shown = self.sources(FI_WEFT_INTERFACE=",".join(name for _, name in socket.if_nameindex() if name != "lo"))
        self.assertEqual(others, every - local, shown)
        _, shown = self.sources(FI_WEFT_INTERFACE="no-such-if")
        self.assertRegex(shown.text, rf"fi_getinfo: -{ENODATA}\b", shown)

    def test_soft0_has_no_gids_to_choose_from(self):
        self.assertEqual(self.sources(FI_WEFT_GID_INDEX="7")[0], self.sources()[0])

    def test_soft0_can_be_left_out(self):
        shown = self.fi_info(programs.SYSTEM, "-p", "weft", "-d", "soft0", FI_WEFT_SOFTVERBS="0")
        self.assertRegex(shown.text, rf"fi_getinfo: -{ENODATA}\b", shown)

    def test_only_named_devices_are_offered(self):
        shown = self.fi_info(programs.SYSTEM, "-p", "weft", FI_WEFT_DEVICE="no-such-device, soft0")
        self.assertIn("soft0", {entry["domain"] for entry in common.infos(shown.out)}, shown)
        shown = self.fi_info(programs.SYSTEM, "-p", "weft", FI_WEFT_DEVICE="no-such-device")
        self.assertRegex(shown.text, rf"fi_getinfo: -{ENODATA}\b", shown)

    @common.per_release
    def test_getinfo_is_quick(self, libfabric):
        """Layers call fi_getinfo several times for each call of the application."""
        shown = programs.run([libfabric.program("fi_info"), "-p", "weft"], libfabric.env(), seconds=5)
        self.assertFalse(shown.late, shown)


class WithoutRdmaCore(unittest.TestCase):
    """A machine without rdma-core: its libraries are hidden in a mount namespace.

    Debian's own libfabric is linked to them and cannot run there, so a libfabric without them is
    used.
    """

    def inside(self, libfabric, argv):
        hide = common.rdma_libraries()
        try:
            spaces.check()
        except spaces.NoNamespaces as error:
            self.skipTest(f"no namespaces: {error}")
        return programs.run(spaces.command(argv, hide=hide), libfabric.env())

    def test_the_libraries_are_really_hidden(self):
        if not common.rdma_libraries():
            self.skipTest("rdma-core is not installed here, there is nothing to hide")
        load = ["python3", "-c", "import ctypes; ctypes.CDLL('libibverbs.so.1')"]
        outside = programs.run(load, programs.SYSTEM.env())
        inside = self.inside(programs.SYSTEM, load)
        self.assertEqual(outside.status, 0, outside)
        self.assertIn("cannot open shared object file", inside.err, inside)

    def test_soft0_is_listed(self):
        for release in (common.libfabric_2_1, common.libfabric_2_5):
            with self.subTest(libfabric=release.__name__):
                libfabric = release()
                shown = self.inside(libfabric, [libfabric.program("fi_info"), "-p", "weft"])
                self.assertEqual(shown.status, 0, shown)
                self.assertIn("soft0", {entry["domain"] for entry in common.infos(shown.out)}, shown)

    def test_data_moves(self):
        libfabric = common.libfabric_2_1()
        pair = "import sys; sys.path.insert(0, sys.argv[1]); from lib import programs as p; " \
            "s, c = p.pingpong(p.Libfabric('2.1', sys.argv[2], sys.argv[3]), 'weft', 'msg', options=['-c']); " \
            "print(s, c); sys.exit(not (c and s.status == 0 == c.status and 'usec/xfer' in c.out))"
        tools = programs.TOP / "tests" / "tools"
        moved = self.inside(libfabric, ["python3", "-B", "-c", pair, tools, libfabric.library, libfabric.programs])
        self.assertEqual(moved.status, 0, moved)

    def test_there_is_no_infiniband_device(self):
        """The tests above hold only on a machine without devices."""
        if os.path.exists("/dev/infiniband"):
            self.skipTest("this machine has /dev/infiniband: the tests above ran with devices present")
